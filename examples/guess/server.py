"""The game behind HTTP: `uvicorn server:app --port 8000` in this folder, and environment.url instead of path.

Each session is a lease: it ends by /close, or TTL_S after the last request that names it.
"""

import os
import time
from typing import Any

from fastapi import FastAPI, HTTPException
from game import reset, step

PLACES, TTL_S = int(os.environ.get("PLACES", "1000")), float(os.environ.get("TTL_S", "60"))
app, sessions = FastAPI(), {}


def session_of(body: dict[str, Any]) -> dict[str, Any]:
    """The session that a request names, after the end of those that nothing names any more."""
    now = time.monotonic()
    for name in [name for name, session in sessions.items() if session["seen_s"] < now - TTL_S]:
        del sessions[name]
    if body["episode_id"] not in sessions:
        raise HTTPException(404, "no such session")
    sessions[body["episode_id"]]["seen_s"] = now
    return sessions[body["episode_id"]]


@app.post("/reset")
async def on_reset(body: dict[str, Any]) -> dict[str, Any]:
    """Begin a session, or the same one again; a full server asks for another try."""
    try:
        session_of(body)
    except HTTPException:
        if len(sessions) >= PLACES:
            raise HTTPException(503, "every place is taken", {"Retry-After": "1"}) from None
    state, observation = reset(body["task"])
    sessions[body["episode_id"]] = {"state": state, "steps": 0, "last": None, "seen_s": time.monotonic()}
    return {"observation": observation, "reward": None, "done": False}


@app.post("/step")
async def on_step(body: dict[str, Any]) -> dict[str, Any]:
    """Take the next step; the last one, asked for again, has the same answer."""
    session, asked = session_of(body), (int(body["request_id"]), body["action"])
    if session["last"] and asked == session["last"][0]:
        return session["last"][1]
    if asked[0] != session["steps"] + 1:
        raise HTTPException(409, f"the session has had {session['steps']} steps")
    session["state"], observation, reward, done = step(session["state"], body["action"])
    session["steps"] += 1
    session["last"] = asked, {"observation": observation, "reward": reward, "done": done}
    return session["last"][1]


@app.get("/state")
async def on_state(episode_id: str) -> dict[str, Any]:
    """The number of steps; it also keeps the session."""
    return {"episode_id": episode_id, "step_count": session_of({"episode_id": episode_id})["steps"]}


@app.post("/close")
async def on_close(body: dict[str, Any]) -> dict[str, Any]:
    """End the session."""
    sessions.pop(body["episode_id"], None)
    return {}
