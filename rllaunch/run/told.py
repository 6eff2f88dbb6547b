"""Errors of other processes in their own words: Ray wraps what an actor raised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rllaunch.errors import RESUME, RllaunchError, RunError


def own(err: RllaunchError) -> RllaunchError:
    """Of an error that Ray raised, ours: Ray makes a class of ours and its own, which has not the three parts and does
    not travel once more."""
    cause = getattr(err, "cause", None)
    return cause if isinstance(cause, RllaunchError) else err


@contextlib.contextmanager
def told(who: str = "a worker process") -> Iterator[None]:
    """Around calls of Ray that raise what an actor raised.

    Args:
        who: what is gone if the actor is.
    """
    from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

    try:
        yield
    except RllaunchError as err:
        raise own(err) from None
    except RayTaskError as err:
        cause = err.cause
        if isinstance(cause, RllaunchError):
            raise cause from None
        # Without the lines that only point at a place in the one above.
        trace = [line for line in str(err).strip().splitlines() if line.strip(" ^~")]
        raise RunError(
            f"a worker failed: {type(cause).__name__}: {cause}",
            [line.strip() for line in trace[-4:-1]],
            RESUME,
        ) from err
    except (ActorDiedError, RayActorError) as err:
        lines = [line.strip() for line in str(err).strip().splitlines() if line.strip()]
        raise RunError(
            f"{who} died",
            list(dict.fromkeys([*lines[:3], *lines[-2:]])),
            f"was it killed for memory? `dmesg` and Ray's session log know; {RESUME}",
        ) from None
