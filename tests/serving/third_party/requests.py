"""Stand-in: get and post by urllib."""

import json as _json
import urllib.error
import urllib.request


class exceptions:
    RequestException = OSError


class _Response:
    def __init__(self, status_code, data):
        self.status_code, self.data = status_code, data

    def json(self):
        return _json.loads(self.data)

    def raise_for_status(self):
        if self.status_code >= 400:
            raise OSError(self.status_code)


def _send(url, data, headers, timeout):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers or {}), timeout=timeout) as answer:
            return _Response(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        return _Response(error.code, error.read())


def get(url, headers=None, timeout=30, **_):
    return _send(url, None, headers, timeout)


def post(url, headers=None, timeout=30, **_):
    return _send(url, b"", headers, timeout)
