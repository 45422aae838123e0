"""Who may look, and what a browser may do with what it gets.

Pages show what agents said and saw, so only this machine is answered, or whoever brings the token. A page of another
site could make a browser ask for ours: it is recognised by the Host it asks for (its own name, bound to this address by
its own name server), and by what the browser says of where a request comes from.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from functools import cache
from hmac import compare_digest
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN = "token"
"""The parameter that brings the token once."""
_COOKIE = "agentloop_inspector_"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[0-9a-z._-]+))(?::[0-9]{1,5})?")
_REFUSED_SITES = ("cross-site", "same-site")


@dataclass(frozen=True)
class Guard:
    """What is let in. Without a token, only requests to this machine by its own name."""

    token: str | None = None
    host: str = "127.0.0.1"
    """What the server listens on."""

    def names(self, host: str) -> bool:
        """Whether a Host header names this server. Somebody else's name can't be an address of numbers."""
        name = _host_name(host)
        if name in LOOPBACK or (name is not None and name == self.host):
            return name not in ("0.0.0.0", "::")
        return self.token is not None and name is not None and (_is_address(name) or name in own_names())


class GuardedApp:
    """An app that is asked only what the guard lets in, and whose every answer carries the headers."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._guard.names(hosts[0]):
            return _refused(400, "Host must be this server's own name or address. Open the address it printed.")
        if scope["method"] not in ("GET", "HEAD"):
            return _refused(405, "The inspector only reads: GET and HEAD.", Allow="GET, HEAD")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != hosts[0]:
            return _refused(403, "Origin must be this server. Open the address it printed.")
        # To follow a link from elsewhere shows a page to its reader and to nobody else.
        followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if headers.get("sec-fetch-site") in _REFUSED_SITES and not followed:
            return _refused(403, "Other sites may not ask for pages. Open the address it printed.")
        return self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        token, name = self._guard.token, _cookie_name(headers)
        if token is None:
            return None
        parameters = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        brought = [value for name, value in parameters if name == TOKEN]
        if brought and _equal(brought[-1], token):
            # The address that is kept, shared or shown to others goes without it.
            rest = urlencode([pair for pair in parameters if pair[0] != TOKEN])
            path = quote(scope["path"].lstrip("/\\"))
            response = RedirectResponse(f"/{path}" + (f"?{rest}" if rest else ""), 303)
            # Lax: a link that is followed from elsewhere brings it, a request of another site does not.
            response.set_cookie(name, token, httponly=True, samesite="lax")
            return response
        if _equal(cookie_parser(headers.get("cookie", "")).get(name, ""), token):
            return None
        return _refused(401, "A token is needed. Open the address that agentloop inspect printed.")


def _refused(status: int, text: str, **headers: str) -> Response:
    return PlainTextResponse(text + "\n", status, headers=headers)


def _equal(given: str, token: str) -> bool:
    return compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def _cookie_name(headers: Headers) -> str:
    """Browsers keep cookies by host alone: inspectors of several runs, each on its port, would take each other's."""
    return _COOKIE + headers["host"].rpartition("]")[2].partition(":")[2]


def _host_name(host: str) -> str | None:
    """Without its port; None for what is no host."""
    found = _HOST.fullmatch(host.lower())
    return found and (found["six"] or found["name"])


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@cache
def own_names() -> tuple[str, ...]:
    """Once: who has no token could make a name server be waited for with every request."""
    return socket.gethostname().lower(), socket.getfqdn().lower()
