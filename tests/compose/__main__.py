"""docker-compose.yml from a user's seat, with a real engine: `make compose-test`.

Build, start, watch, scale, kill, submit a reward function from outside, read Prometheus, and see the arithmetic example
through to its end; then what is refused, in words. Grafana's image is left out: what is checked of it is in the other
tests. Exit codes: 0 all held, 1 something did not, 3 there is no engine, so nothing was tested.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas

from tests.compose.agents import agents_play, input_folder
from tests.compose.docker_engine import ROOT, Docker, NoEngineError, engine
from tests.compose.project import ComposeProject, report_progress, until
from tests.compose.refusals import generator_with_another_token, refusals, unreadable_secrets

EXIT_FAILED, EXIT_NOT_TESTED = 1, 3
NOT_HERE = ("grafana",)
# The files in the folder of policies that processes of a container have open.
POLICIES = """
import glob, os
opened = {os.path.realpath(link) for link in glob.glob("/proc/[0-9]*/fd/*")}
print(*sorted(path for path in opened if path.startswith("/policies/")))
"""
SERVICES = ("coordinator", "reward", "generation", "learner")
# Of the images without torch. The coordinator's reads every format of prompts, and serves the page of the run.
MAX_ADDED_MB = {"coordinator": 500, "reward": 300, "agents": 300, "proxy": 300}
# Far more than a quiet machine takes: CI shares its own with other work.
READY_S = 900
OUTSIDE = ("pypi.org", "1.1.1.1")
WHEELS = ROOT / "deploy/docker/wheels"
BETTER = """
def reward(prompts, completions, answer, **columns):
    return [float(a in str(c)) for c, a in zip(completions, answer)]
"""
# Everything in a container but its process 1 and whoever asks: as when it runs out of memory.
KILL_ALL = "import os; os.kill(-1, 9)"


def torch_wheel() -> None:
    """The images take torch from PyTorch's index; a machine that finds it elsewhere puts it into the build context."""
    (version,) = re.findall(r" (torch==[\w.+]+); fi", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    if not list(WHEELS.glob("torch-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(WHEELS), version]
        found = subprocess.run(pip, capture_output=True, check=False, timeout=300).returncode == 0
        report_progress(f"{version}: {'taken along' if found else 'from the index of PyTorch'}")


def build(docker: Docker) -> None:
    """Both files are sound, every image can be built, and those without torch are small."""
    docker.compose("config", "-q")
    docker.compose("-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml", "config", "-q")
    torch_wheel()
    docker.compose("--profile", "agents", "build", timeout_s=900)
    base = docker.inspect("python:3.11-slim-bookworm")["Size"]
    for name in ("coordinator", "reward", "agents", "proxy", "engine"):
        image = docker.inspect(f"gspo-{name}")
        added = (image["Size"] - base) / 1e6
        report_progress(f"image gspo-{name} adds {added:.0f} MB to its base")
        assert image["Config"]["User"] == "gspo", f"gspo-{name} runs as {image['Config']['User'] or 'root'}"
        most = MAX_ADDED_MB.get(name, added)
        assert added <= most, f"gspo-{name} adds {added:.0f} MB, and may add {most}"


def start(house: ComposeProject, services: list[str], line: str) -> None:
    """`up` until everything is ready."""
    # What is left out of the test must be left out by name: all others are named instead.
    house.as_documented(
        line, "--wait", "--wait-timeout", str(READY_S), "--no-recreate", *services, timeout_s=READY_S + 30
    )


def contained(house: ComposeProject) -> None:
    """Each service runs without root, capabilities or a root file system to write to, within its limits."""
    docker = house.docker
    for service in SERVICES:
        container = docker.containers(service)[0]
        facts = docker.python(container, "print(open('/proc/self/status').read())")
        status = dict(line.split(":\t", 1) for line in facts.splitlines() if ":\t" in line)
        assert status["Uid"].split()[0] == "1000", service
        assert int(status["CapEff"], 16) == 0, f"{service} has capabilities {status['CapEff']}"
        assert status["NoNewPrivs"] == "1", service
        host = docker.inspect(container)["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["Memory"] > 0, service
        assert host["PidsLimit"] > 0, service
        written = docker.run("exec", container, "python", "-c", "open('/app/x', 'w')", check=False)
        assert "Read-only file system" in written.stderr, f"{service}: {written.stderr}"
    redis = docker.run("exec", docker.containers("redis")[0], "redis-cli", "ping", check=False)
    assert "NOAUTH" in redis.stdout, f"Redis answers without its password: {redis.stdout}"
    reward = docker.containers("reward")[0]
    shut_off(docker, reward)
    ready = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/readyz').read().decode())"
    sandbox = json.loads(docker.python(reward, ready))["sandbox"]
    assert sandbox.startswith(("landlock", "bubblewrap")), f"user code is contained by {sandbox}"
    assert "seccomp" in sandbox
    report_progress(f"contained; reward functions by {sandbox}")


def shut_off(docker: Docker, reward: str) -> None:
    """The reward service reaches nothing of what a service beside it reaches outside."""
    reach = "import socket, sys; socket.create_connection((sys.argv[1], 443), 3)"

    def reaches(container: str, host: str) -> bool:
        return docker.run("exec", container, "python", "-c", reach, host, check=False).returncode == 0

    (beside,) = docker.containers("coordinator")
    outside = [host for host in OUTSIDE if reaches(beside, host)]
    assert outside, f"none of {OUTSIDE} can be reached from here, so nothing is told about the reward service"
    assert not [host for host in outside if reaches(reward, host)], f"the reward service reaches one of {outside}"


def chat(house: ComposeProject) -> None:
    """The gateway, started beside the second generator, answers with the policy that trains."""
    call = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
    path = "/v1/chat/completions"
    reply = until("an answer of the gateway", lambda: house.ask("GSPO_GATEWAY_PORT", path, body=call), 120)
    assert reply["usage"]["completion_tokens"] > 0, reply
    try:
        house.ask("GSPO_GATEWAY_PORT", path, body=call, token="wrong")
    except urllib.error.HTTPError as error:
        assert error.code == 401, error
    else:
        raise AssertionError("the gateway let a wrong token in")
    report_progress(f"the gateway answered: {reply['choices'][0]['message']['content']!r}")


def scale(house: ComposeProject, services: list[str]) -> None:
    """A second generator and scorer join, under names of their own, and both generate; a gateway starts meanwhile."""
    house.as_documented("docker compose --profile gateway up -d --build", "--no-deps", "--no-recreate", "gateway")
    start(house, services, "docker compose up -d --scale generation=2 --scale reward=2")

    def both() -> list[str] | None:
        names = [instance["name"] for instance in house.state()["members"] if instance["service"] == "generation"]
        return names if len(names) == 2 else None

    names = until("a second generator", both, 60)
    assert len(set(names)) == 2, f"replicas share a name: {names}"
    assert all(re.fullmatch(r"generation-[0-9a-f]{12}", name) for name in names), names
    house.ask("GSPO_PORT", "/v1/resume", post=True)
    generated = 'sum by (instance) (gspo_rollouts_generated_total{evaluation="no"}) > 0'
    until("rollouts of both generators", lambda: found if len(found := house.query(generated)) == 2 else None, 90)
    opened = [house.docker.compose("exec", "-T", "--index", at, "generation", "python", "-c", POLICIES) for at in "12"]
    assert opened[0] == opened[1] != "\n", f"files with policies that the generators have open: {opened}"
    report_progress(f"two generators at work, with the policies of one file: {', '.join(names)}")


def gspo(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """A command of gspo on this machine, outside of every container."""
    command = [sys.executable, "-m", "gspo.cli", *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def submit(house: ComposeProject, folder: Path) -> None:
    """A reward function from outside, by the command of the README, through the published port."""
    file, rows = folder / "better.py", folder / "rows.jsonl"
    file.write_text(BETTER)
    rows.write_text(json.dumps({"prompt": "1+1=", "completion": "2", "answer": "2"}) + "\n")
    environment = {
        **os.environ,
        "GSPO_REWARD_URL": house.address("GSPO_REWARD_PORT"),
        "GSPO_REWARD_TOKEN": house.token,
    }
    for words in (["submit", str(file), "--name", "better"], ["try", "better", str(rows)], ["list"]):
        done = gspo(environment, "reward", *words)
        assert done.returncode == 0, f"gspo reward {words[0]}: {done.stdout}{done.stderr}"
    assert "better" in done.stdout
    wrong = gspo({**environment, "GSPO_REWARD_TOKEN": "wrong"}, "reward", "list")
    assert wrong.returncode == 2, f"a wrong token was let in: {wrong.stdout}{wrong.stderr}"
    report_progress("a reward function was submitted and tried from outside")


def kill(house: ComposeProject, service: str) -> None:
    """Kill everything in one container at once; the engine starts it again, and the run goes on."""
    container, before = house.docker.containers(service)[0], int(house.state()["step"])
    house.docker.python(container, KILL_ALL, check=False)

    def again() -> bool | None:
        facts = house.docker.inspect(container)
        return True if facts["RestartCount"] >= 1 and facts["State"]["Running"] else None

    until(f"a restart of {service}", again, 60)
    after = until(f"a step after {before}", house.step_above(before + 1), 240)
    report_progress(f"{service} killed at step {before}, run at step {after}")


def watched(house: ComposeProject) -> None:
    """Prometheus sees every process of every service, by its service's name."""

    def all_up() -> dict[str, float] | None:
        found = house.query("sum by (job) (up)")
        return (
            found
            if found.keys() >= {*SERVICES, "gateway"} and found["generation"] == 2 and min(found.values()) > 0
            else None
        )

    up = until("all targets in Prometheus", all_up, 60)
    # A learner that was started again serves its step from the next one on.
    until("a step in Prometheus", lambda: house.query("max(gspo_step) > 0") or None, 120)
    report_progress(f"Prometheus: {up}")


def finish(house: ComposeProject) -> None:
    """The run ends by itself: every service with exit code 0."""

    def ended() -> dict[str, int] | None:
        containers = [c for service in (*SERVICES, "gateway") for c in house.docker.containers(service)]
        states = {c: house.docker.inspect(c)["State"] for c in containers}
        return None if any(s["Running"] for s in states.values()) else {c: s["ExitCode"] for c, s in states.items()}

    codes = until("the end of the run", ended, 420)
    assert set(codes.values()) == {0}, f"exit codes {codes}"
    report_progress("the run has ended")


def results(house: ComposeProject, folder: Path) -> None:
    """What the run left: every step once, every group in one of them, and a model that adds better than before."""
    told = house.as_documented("docker compose run --rm gspo report /runs/current")
    assert "report.html" in told, told
    # Into a folder that this test removes.
    house.as_documented("docker compose cp prepare:/runs ./runs".replace("./runs", str(folder / "runs")))
    followed = house.first_line("docker compose logs -f learner")
    assert "learner" in followed, followed
    run = (folder / "runs/current").resolve()
    log = pandas.concat(
        [pandas.read_parquet(path, columns=["step", "group"]) for path in run.glob("log/step-*.parquet")]
    )
    steps = sorted(set(log["step"]))
    assert steps == list(range(1, len(steps) + 1))
    assert (log.groupby("group")["step"].nunique() == 1).all(), "a group was trained in two steps"
    measured = [json.loads(line)["figures"] for line in (run / "log/evaluations.jsonl").read_text().splitlines()]
    first, last = measured[0]["sampled_mean"], measured[-1]["sampled_mean"]
    assert last > first + 0.2, f"accuracy {first:.2f} before, {last:.2f} after"
    report_progress(f"{len(steps)} steps, accuracy {first:.2f} before and {last:.2f} after")


@contextmanager
def project(environment: dict[str, str]) -> Iterator[ComposeProject]:
    """A compose project of its own with ports of its own; nothing of it is left behind."""
    kinds = ("", "REWARD_", "GATEWAY_", "PROMETHEUS_", "GRAFANA_")
    names = [f"GSPO_{kind}PORT" for kind in kinds]
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        ports = dict(zip(names, (one.getsockname()[1] for one in sockets), strict=True))
    own = {"COMPOSE_PROJECT_NAME": f"gspo-test-{os.getpid()}", **{name: str(port) for name, port in ports.items()}}
    docker = Docker({**environment, **own, "GSPO_START_PERIOD": f"{READY_S}s"})
    try:
        yield ComposeProject(docker, own["COMPOSE_PROJECT_NAME"], ports)
    finally:
        everything = ("--profile", "tools", "--profile", "agents")
        docker.compose(*everything, "down", "-v", "--timeout", "20", "--remove-orphans", timeout_s=180, check=False)
        left = docker.run(
            "ps", "-a", "-q", "--filter", f"label=com.docker.compose.project={own['COMPOSE_PROJECT_NAME']}"
        )
        assert not left.stdout.strip(), f"containers were left behind: {left.stdout}"


def story(house: ComposeProject) -> None:
    """The whole of it, in a user's order."""
    docker = house.docker
    services = [name for name in docker.compose("config", "--services").split() if name not in NOT_HERE]
    build(docker)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        refusals(docker, folder)
        report_progress("what cannot work is refused in one line")
        start(house, services, "docker compose up -d --build --wait")
        house.token = house.as_documented("docker compose exec coordinator cat /secrets/token").strip()
        assert house.as_documented("docker compose exec coordinator cat /secrets/grafana_password").strip()
        report_progress(f"ready: {', '.join(services)}")
        house.ask("GSPO_PORT", "/v1/pause", post=True)
        contained(house)
        submit(house, folder)
        unreadable_secrets(docker, folder)
        generator_with_another_token(house, folder)
        report_progress("a generator with another token is named by both sides, and the run goes on without it")
        scale(house, services)
        chat(house)
        kill(house, "generation")
        kill(house, "learner")
        watched(house)
        finish(house)
        results(house, folder)
        house.as_documented("docker compose down")
        kept = docker.run("volume", "ls", "-q", "--filter", f"label=com.docker.compose.project={house.project}").stdout
        assert f"{house.project}_runs" in kept.split(), f"`down` removed the run: {kept}"


def main() -> None:
    """Run the story, or with `agents` that of agents, and show the services' last words where it does not hold."""
    with_agents = sys.argv[1:] == ["agents"]
    try:
        with engine() as environment, tempfile.TemporaryDirectory() as folder:
            variables = {"GSPO_INPUT": str(input_folder(Path(folder)))} if with_agents else {}
            with project({**environment, **variables}) as house:
                try:
                    if with_agents:
                        build(house.docker)
                        agents_play(house, READY_S)
                    else:
                        story(house)
                except (AssertionError, OSError):
                    print(house.docker.compose("ps", "-a", check=False))
                    print(house.docker.compose("logs", "--no-color", "--tail", "25", check=False))
                    raise
    except NoEngineError as error:
        print(f"compose-test: NOT TESTED: {error}", file=sys.stderr)
        sys.exit(EXIT_NOT_TESTED)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        print(f"compose-test: FAILED: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    report_progress("compose-test: all held")


if __name__ == "__main__":
    main()
