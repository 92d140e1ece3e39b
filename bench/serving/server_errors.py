"""What can go wrong with a server: every failure of a request is one of these."""

from __future__ import annotations


class ServerError(Exception):
    """Base of what can go wrong with a server."""


class ServerGone(ServerError):
    """No connection, or one that broke before the answer was whole."""


class ServerTimeout(ServerError):
    """No byte within the time allowed, or no whole answer within the time allowed in all."""


class ServerNonsense(ServerError):
    """An answer that is no JSON, too large, or of another shape than this route's answers have."""


class ServerRefused(ServerError):
    """An answer with a status other than 200, or an error in place of an event of a stream (its code is the status)."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status
