"""Stand-in: POST over asyncio streams, the body line by line as it arrives."""

import asyncio
import json
import urllib.parse


class ClientTimeout:
    def __init__(self, total=None):
        self.total = total


class Content:
    """The answer's body, a line at a time; a body that breaks off raises."""

    def __init__(self, reader, headers):
        self.reader, self.headers = reader, headers

    async def pieces(self):
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
        else:
            yield await self.reader.readexactly(int(self.headers["content-length"]))

    async def __aiter__(self):
        kept = b""
        async for piece in self.pieces():
            *lines, kept = (kept + piece).split(b"\n")
            for line in lines:
                yield line + b"\n"
        if kept:
            yield kept


class Response:
    def __init__(self, status, reason, content):
        self.status, self.reason, self.content = status, reason, content

    async def text(self):
        return b"".join([line async for line in self.content]).decode()


class Post:
    def __init__(self, url, body, headers):
        self.parts, self.body, self.headers, self.writer = urllib.parse.urlsplit(url), body, headers or {}, None

    async def __aenter__(self):
        reader, self.writer = await asyncio.open_connection(self.parts.hostname, self.parts.port, limit=1 << 24)
        data = json.dumps(self.body).encode()
        head = {
            "Host": self.parts.netloc,
            "Content-Type": "application/json",
            "Content-Length": len(data),
            **self.headers,
        }
        lines = [f"POST {self.parts.path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        self.writer.write("\r\n".join(lines).encode() + data)
        await self.writer.drain()
        status_line = (await reader.readuntil(b"\r\n")).decode().split(None, 2)
        headers = {}
        while line := (await reader.readuntil(b"\r\n")).decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return Response(int(status_line[1]), status_line[2].strip(), Content(reader, headers))

    async def __aexit__(self, *_):
        if self.writer is not None:
            self.writer.close()


class ClientSession:
    def __init__(self, **_):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    def post(self, url, json=None, headers=None):
        return Post(url, json, headers)
