"""The text of docs/chaos.md around its tables."""

from __future__ import annotations

PAGE = """# Chaos

`make chaos` writes this page. It injects one fault after another into a run, and checks the run's log afterwards. \
Rounds are kept: it plays only those that are missing, and interrupted ones again. Seed {seed} repeats this schedule: \
kinds, order, targets and pauses.

**{num_faults} faults of {num_kinds} kinds in {num_rounds} rounds: {num_simulated} in simulated runs, {num_engines} in \
runs of the real engines. {steps} steps, {issued} groups. {verdict}**

- **Simulated.** Coordinator, generation and reward services, learner, Redis, streams, push and log are real. Engine \
and training step are simulated (`benchmarks/simulated`): they take time, and every log-prob is a function of token, \
position and weights, so the check can compute it again. There are two generators and two reward replicas. Each \
process has its own network namespace.
- **Real engines.** vLLM and DeepSpeed train a random model of two layers. One run has conversations with an \
environment of its user. In the other, sandboxed agents call the policy through the gateway. All processes are on \
loopback.

The run directory, with Redis's file, is on a disk of 512 MiB. Every service reaches Redis through a proxy of its own. \
After the last fault the run is stopped by Ctrl-C, resumed, and ends by itself. The machine ({machines}) was shared \
with other work, and simulated rounds were played side by side.

## Faults

A fault ends (`lasts`) when the process continues, the network is back, or the disk works. The run has *recovered* \
when every process runs, every generator has the newest weights, and two more steps are trained. Seconds count from \
the start of the fault. `never` means not within 120 s of its end, or 600 s with the real engines.

{kinds}

- `kill`, `stop`: SIGKILL, or SIGSTOP for 35 s. A process is stopped with its children. `stop all` stops every process \
of the run at once, Redis and the command line too.
- `drop replies`: for 5 s, every third reply of Redis to a service is lost. Half of it arrives or nothing, and the \
connection ends.
- `close client`: for 5 s, Redis closes every connection of a service (CLIENT KILL), twenty times a second.
- `flush redis`: FLUSHALL.
- `cut network`: packets between two processes, or a process and Redis, are dropped without a reset.
- `fill disk`: no byte is free for log, checkpoints and Redis's file.
- `slow disk`: writes and syncs of every process, Redis too, wait for 30 s (FIFREEZE).
- `corrupt push`: one bit of a weight frame changes in transit.
- `hang reward`: the reward function stops answering, and so does the environment.
- `clock back`, `clock forward`: the wall clock of one process moves by an hour, and back after 8 s. Its monotonic \
clock is unchanged.

A step that always fails ends a run; `tests/chaos/test_left_out.py` resumes such a run without the step.

![Seconds to recover](chaos.png)

## Invariants

{findings}

Groups over all rounds: {groups}. Dead letters: {dead_letters}.

## Rounds

A round has each kind once. It ends at a fault without a recovery, and the later ones are left out.

{rounds}

{breaks}{engines}Every fault with its target and time is in [chaos.json](chaos.json).
"""
ENGINES = """## Learning under kills

The arithmetic example (vLLM, DeepSpeed) runs once undisturbed and once with periodic SIGKILLs of a service or Redis \
(`python -m benchmarks chaos-engines`). Accuracy is of 1,000 answers to 250 held-out problems, with its standard \
error. Undisturbed runs of different seeds differ by up to 0.05.

{runs}

"""
