"""What ``state_dict`` says of state that lives on servers: a small handle, of plain containers and one tensor."""

from typing import Any

from longshore.errors import StateError, invalid

KEY = "longshore"
_FORMAT = 1


def handle(job: str, version: int, made: int, rule: str, fingerprint: str | None) -> dict[str, Any]:
    """What names a version of a job. The fingerprint is of its parameters, once the job is open.

    Args:
        made: how many steps were made, which is noted where a delayed job has more of them than the version that is held.
    """
    found = {"format": _FORMAT, "job": job, "version": version, "rule": rule, "fingerprint": fingerprint}
    return found if made == version else {**found, "made": made}


def made(handle: dict[str, Any]) -> int:
    """How many steps had been made."""
    steps: int = handle.get("made", handle["version"])
    return steps


def note(state_dict: dict[str, Any]) -> None:
    """Has each param group name the job, too: ``torch.distributed.checkpoint.state_dict`` takes a state apart, and keeps these alone."""
    for group in state_dict["param_groups"]:
        group[KEY] = dict(state_dict[KEY])


def with_handle(state_dict: dict[str, Any], *, has_moments: bool) -> dict[str, Any]:
    """The same with its handle in its place and nowhere else. A state that has moments is one that needs none."""
    groups = state_dict["param_groups"]
    noted = [group[KEY] for group in groups if KEY in group]
    whole = {**state_dict, "param_groups": [{key: value for key, value in group.items() if key != KEY} for group in groups]}
    if noted and KEY not in state_dict and not has_moments:
        whole[KEY] = noted[0]
    return whole


def check_is_whole(state_dict: dict[str, Any], *, has_moments: bool) -> None:
    """Refuses a handle that has lost the job's name, which would pass for a state of torch from before its first step.

    Raises:
        StateError: saying what to save instead.
    """
    steps = [float(state["step"]) for state in state_dict["state"].values() if "step" in state]
    if any(steps) and not has_moments:
        raise invalid(
            "state_dict",
            f"one of {max(steps):.0f} steps without moments and without a job",
            "a handle, or all state",
            "save optimizer.state_dict() as it is, or state_dict(full=True). torch.distributed.checkpoint.state_dict leaves a handle whole "
            "unless it is asked for flatten_optimizer_state_dict=True",
            StateError,
        )


def is_of_job(given: dict[str, Any], job: str) -> bool:
    """Whether it is a handle of this job, or all state of it."""
    theirs = given.get(KEY)
    return isinstance(theirs, dict) and theirs.get("job") == job


def refuse_to_fill(job: str, version: int) -> Exception:
    """The error for a state that was given to a job that has its own."""
    return invalid(
        "state_dict",
        f"one of another optimizer, and job {job} is at version {version}",
        "given to a new job, before its first step",
        "load it right after the optimizer is built, with a job= that the servers do not have; or go on from the servers' state "
        "without loading one",
        StateError,
    )


def check(given: dict[str, Any], mine: dict[str, Any]) -> None:
    """Refuses a state that is not the very one that the servers have.

    Raises:
        StateError: naming what differs, and what to do.
    """
    theirs = given.get(KEY)
    if not isinstance(theirs, dict):
        raise invalid(
            "state_dict",
            f"one with {', '.join(sorted(map(str, given)))}",
            "one that an optimizer of longshore returned",
            "load the state of another optimizer right after building this one, before its first step",
            StateError,
        )
    if theirs.get("format") != _FORMAT:
        remedy = "load it with the version of longshore that saved it"
        raise invalid("state_dict['longshore']['format']", theirs.get("format"), str(_FORMAT), remedy, StateError)
    if theirs["job"] != mine["job"]:
        raise invalid(
            "state_dict['longshore']['job']",
            theirs["job"],
            f"{mine['job']}, this optimizer's job",
            f"build the optimizer with job={theirs['job']!r} and the servers that hold it. A job of a server inside a "
            "process ends with that process, unless its tier is nvme or shm",
            StateError,
        )
    for field in ("rule", "fingerprint"):
        if None not in (theirs[field], mine[field]) and theirs[field] != mine[field]:
            raise invalid(
                f"state_dict['longshore']['{field}']",
                theirs[field],
                f"{mine[field]}, this optimizer's",
                "build the optimizer with the parameters and groups that the job has",
                StateError,
            )
    if theirs["version"] != mine["version"] or made(theirs) < made(mine):
        raise invalid(
            "state_dict['longshore']['version']",
            theirs["version"],
            f"{made(mine)}, which the servers have",
            "go on from the servers' version, or load a state of whose version the servers have a checkpoint: "
            "optimizer.checkpoint() writes one where a server has a folder for them (--checkpoint-dir)",
            StateError,
        )
