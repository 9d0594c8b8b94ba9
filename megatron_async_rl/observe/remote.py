"""What went wrong in another process, in that process's own words."""

from __future__ import annotations


def remote_cause(error: BaseException) -> BaseException:
    """The exception a Ray task raised, out of Ray's wrappers around it; any other error is returned as it is.

    A wrapper's own text holds the remote tracebacks, hundreds of lines of them, which the remote process's log has too.
    """
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error
