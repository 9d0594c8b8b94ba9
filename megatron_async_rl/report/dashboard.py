"""HTTP server with live pages of runs (`mar dashboard RUN...`).

    /                        the page, whose script requests the other paths
    /state/<view>?have=TAG   parts and panels of a view as JSON; no content if TAG is current
    /samples/<run>?...       samples of a run as JSON

A view is the number of a run, from 0, or `all` for the comparison.

Invariants:
- the server serves only pages and samples of the runs named at its start: no request names a file,
  and no request changes anything;
- it accepts only requests whose Host header is an address, a name of this machine or an allowed
  name. Another site could otherwise read the runs by DNS rebinding;
- each line of a growing file is read once, and a view is rendered again only if a file of its runs
  has changed;
- the page of a run with damaged files shows the error and continues to update.
"""

from __future__ import annotations

import errno
import gzip
import html
import ipaddress
import json
import socket
from collections.abc import Callable, Hashable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.report.comparison import colour_of, name_runs, names_of, page_of_runs
from megatron_async_rl.report.page import Page, head, page_of, problem
from megatron_async_rl.report.run_data import ReportError, RunData, RunReader
from megatron_async_rl.report.sample_browser import SampleBrowser, form
from megatron_async_rl.watchdog.events import read_status
from megatron_async_rl.watchdog.limited_server import LimitedThreads

ALL = "all"
MIN_COMPRESSED_BYTES = 2_000
"""Size from which a response is compressed."""


class Dashboard:
    """Views of runs, for the threads of a server."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """Check the directories. Raises UserError for a directory that is missing or repeated, or
        that contains runs but is not a run."""
        # Compare absolute paths, because two relative paths may name the same run.
        self._paths = [path.absolute() for path in run_dirs]
        for path in self._paths:
            if not path.is_dir():
                fix = "name the run.dir of a run; `mar train` creates it when it starts"
                raise UserError.of("RUN", f"{path} is not a directory", fix)
            # Users often name a folder of runs; the error then shows the right command.
            within = [one for one in path.glob("*/metrics.jsonl") if one.is_file()]
            if within and not (path / "metrics.jsonl").exists():
                what = f"{path} is not a run; it contains {len(within)}"
                raise UserError.of("RUN", what, f"name them: mar dashboard {path}/*/")
        if len(set(self._paths)) < len(self._paths):
            raise UserError.of("RUN", "a run is named twice", "name each run once")
        # Keep one reader per run, because a reader reads only new lines.
        self._readers = [RunReader(path, alone=False) for path in self._paths]
        self._browsers = [SampleBrowser(path) for path in self._paths]
        self._rendered: dict[str, tuple[Hashable, str, bytes]] = {}
        """View -> (fingerprint of its files, tag, state)."""
        # Readers are not thread-safe: they keep positions in files.
        self._lock = Lock()

    @property
    def first_view(self) -> str:
        """View that the page shows first."""
        return ALL if len(self._paths) > 1 else "0"

    def page(self) -> bytes:
        """Return the page without content; its script requests the state."""
        parts = {"TITLE": "Runs", "FOOTER": "Reading the runs."}
        return Page(parts=parts).as_html(live=self.first_view).encode()

    def state(self, view: str, have: str) -> bytes | None:
        """Return the state of a view; None if `have` is its current tag. Raises KeyError for an
        unknown view."""
        if view not in self._views():
            raise KeyError(view)
        with self._lock:
            readers = self._readers if view == ALL else [self._readers[int(view)]]
            # Take the fingerprint before reading, so that rows written in between change the next
            # fingerprint.
            now = tuple(reader.fingerprint() for reader in readers)
            rendered = self._rendered.get(view)
            # Render only after a change: a browser polls every few seconds, and rendering takes far
            # longer than a stat of each file.
            if rendered is None or rendered[0] != now:
                state, tag = self._render(view).as_state()
                rendered = self._rendered[view] = (now, tag, state)
        # Send no content for an equal tag, so that polling a finished run costs no transfer.
        return None if have == rendered[1] else rendered[2]

    def samples(self, view: str, query: dict[str, str]) -> bytes:
        """Return samples as JSON. Raises KeyError for a view that is not a run, and UserError for
        an invalid query or an unreadable log."""
        if view not in self._views() or view == ALL:
            raise KeyError(view)
        with self._lock:
            # A SampleBrowser is not thread-safe, either.
            return json.dumps(self._browsers[int(view)].answer(query)).encode()

    def _views(self) -> list[str]:
        numbers = [str(number) for number in range(len(self._paths))]
        return [ALL, *numbers] if len(numbers) > 1 else numbers

    def _render(self, view: str) -> Page:
        page = self._all() if view == ALL else self._one(int(view))
        return Page(parts={**page.parts, "RUNS": self._links()}, panels=page.panels)

    def _links(self) -> str:
        """Return HTML with links to all views; empty for a single run."""
        if len(self._paths) == 1:
            return ""
        links = [f'<a href="#{ALL}">All runs</a>']
        for number, name in enumerate(names_of(self._paths)):
            dot = f'<i style="background:var(--{colour_of(number)})"></i>'
            links.append(f'<a href="#{number}">{dot}{html.escape(name)}</a>')
        return "".join(links)

    def _one(self, number: int) -> Page:
        reader = self._readers[number]
        try:
            return page_of(reader.read(), form())
        # A run without a finished step is a normal state; other errors are damage.
        except ReportError as error:
            return _waiting(reader.run_dir, _problems(error))
        except UserError as error:
            return _damaged(reader.run_dir, error)

    def _all(self) -> Page:
        runs: list[RunData | None] = []
        errors = []
        for name, reader in zip(names_of(self._paths), self._readers, strict=True):
            try:
                runs.append(reader.read())
            except UserError as error:
                # None is a placeholder, so that the other runs keep their names and colours.
                runs.append(None)
                errors.append(f"<li>{html.escape(f'{name}: {_problems(error)}')}</li>")
        compared = name_runs(self._paths, runs)
        try:
            page = page_of_runs(compared) if compared else Page(parts={"TITLE": "No steps yet"})
        except UserError as error:
            page = _damaged(self._paths[0].parent, error)
        if not errors:
            return page
        heading = "<h2>Runs that cannot be shown</h2>"
        missing = f'<section class="card wrong">{heading}<ul>{"".join(errors)}</ul></section>'
        return Page(parts={**page.parts, "WRONG": missing}, panels=page.panels)


def _problems(error: UserError) -> str:
    """Return the problems of an error, with their files, as text."""
    return ". ".join(
        one.what if one.key == "RUN" else f"{one.key} {one.what}" for one in error.problems
    )


def _waiting(run_dir: Path, why: str) -> Page:
    """Return the page of a run without a finished step."""
    try:
        parts = head(run_dir.name, str(run_dir), read_status(run_dir))
    except UserError as error:
        return _damaged(run_dir, error)
    message = f'<section class="card"><h2>No steps yet</h2><p>{html.escape(why)}.</p></section>'
    return Page(parts={**parts, "WRONG": message})


def _damaged(run_dir: Path, error: UserError) -> Page:
    """Return the page of a run whose files cannot be read."""
    return Page(parts={**head(run_dir.name, str(run_dir), None), "ERROR": problem(str(error))})


class _DashboardServer(LimitedThreads, HTTPServer):
    """HTTP server of a dashboard, with a limited number of threads."""

    def __init__(
        self, host: str, port: int, dashboard: Dashboard, allowed: Sequence[str] = ()
    ) -> None:
        """Listen on an address. `allowed`: further host names that requests may use."""
        # Resolve the host here, because HTTPServer itself supports IPv4 only.
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Prefer IPv4, which every client supports: `localhost` may resolve to both families.
        addresses.sort(key=lambda one: one[0] != socket.AF_INET)
        self.address_family, address = addresses[0][0], addresses[0][4]
        self.dashboard = dashboard
        self.loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        # The machine's public names do not lead to a loopback address.
        own = () if self.loopback else (socket.gethostname(), socket.getfqdn())
        self.names = {_plain(name) for name in ("localhost", host, *own, *allowed)}
        super().__init__(address[:2], _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the browser closed its connection. The handler itself responds to other
        errors with status 500."""


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: _DashboardServer
    protocol_version = "HTTP/1.1"
    server_version = "mar"
    sys_version = ""
    timeout = 60
    """Seconds after which an idle connection is closed, which frees its thread."""

    def do_GET(self) -> None:
        status, media_type, content = self._respond()
        compressed = len(content) >= MIN_COMPRESSED_BYTES and "gzip" in self.headers.get(
            "Accept-Encoding", ""
        )
        if compressed:
            # Use a low level: higher ones take longer and save little.
            content = gzip.compress(content, compresslevel=3)
        self.send_response(status)
        # Prompts may be confidential: browsers must not store them, and no other site may embed or
        # read the page.
        headers = {
            "Content-Type": f"{media_type}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        if compressed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        # A response to HEAD has the same headers and no body.
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Do nothing: the terminal shows no line for each request."""

    def _respond(self) -> tuple[HTTPStatus, str, bytes]:
        """Return (status, media type, content) for the request."""
        text, data = "text/plain", "application/json"
        # Check the host for every path, because any path may be requested by DNS rebinding.
        name = _name_in(self.headers.get("Host", ""))
        if name not in self.server.names and not _is_address(name):
            known = " or ".join(sorted(one for one in self.server.names if not _is_address(one)))
            message = (
                f"the dashboard does not accept the host name {name!r}: open an address of its"
                f" machine or {known}, or start it with --allow-host {name or 'NAME'}"
            )
            return HTTPStatus.FORBIDDEN, text, message.encode()
        requested = urlsplit(self.path)
        # Use the last value of a repeated field.
        query = {name: values[-1] for name, values in parse_qs(requested.query).items()}
        dashboard = self.server.dashboard
        try:
            match requested.path.split("/")[1:]:
                case [""]:
                    return HTTPStatus.OK, "text/html", dashboard.page()
                case ["state", view]:
                    state = dashboard.state(view, query.get("have", ""))
                    if state is None:
                        return HTTPStatus.NO_CONTENT, data, b""
                    return HTTPStatus.OK, data, state
                case ["samples", view]:
                    return HTTPStatus.OK, data, dashboard.samples(view, query)
        # An unknown view leads to the response for an unknown path.
        except KeyError:
            pass
        except UserError as error:
            message = "; ".join(f"{one.key}: {one.what}: {one.fix}" for one in error.problems)
            return HTTPStatus.BAD_REQUEST, text, message.encode()
        except Exception as error:  # noqa: BLE001 - the page shows it; the server continues
            message = f"the dashboard failed: {type(error).__name__}: {error}"
            return HTTPStatus.INTERNAL_SERVER_ERROR, text, message.encode()
        return HTTPStatus.NOT_FOUND, text, b"page not found"


def _name_in(host: str) -> str:
    """Return the host name in a Host header (HOST or HOST:PORT); empty if it is invalid."""
    try:
        # The URL parser removes the port and the brackets of an IPv6 address.
        return _plain(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return ""


def _plain(name: str) -> str:
    """Return a host name without the differences that DNS ignores."""
    # Case is ignored, and a final dot only marks a fully qualified name.
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def serve(
    run_dirs: Sequence[Path],
    host: str,
    port: int,
    show: Callable[[str], None],
    allowed: Sequence[str] = (),
) -> None:
    """Serve until Ctrl-C. Port 0 selects a free port. `show` is called with each message for the
    terminal, the first one with the address. `allowed`: further host names that requests may use.

    Raises UserError for a missing directory, an unavailable host or port, and an invalid name.
    """
    for name in allowed:
        # A URL or a name with a port would never match a Host header.
        if _name_in(name) != _plain(name):
            fix = "name only the host, such as node7.example.org for http://node7.example.org:8470/"
            raise UserError.of("--allow-host", f"{name!r} is not a host name", fix)
    dashboard = Dashboard(run_dirs)
    try:
        server = _DashboardServer(host, port, dashboard, allowed)
    except (OSError, ValueError, OverflowError) as error:
        raise _unavailable(host, port, error) from error
    with server:
        name = f"[{host}]" if ":" in host else host
        show(f"http://{name}:{server.server_port}/  (press Ctrl-C to stop)")
        if not server.loopback:
            show("note: anyone who can reach this address can read the runs and their samples")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _unavailable(host: str, port: int, error: Exception) -> UserError:
    """Return the error for a server that cannot listen."""
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        fix = "name another port, or set --port 0 to select a free one"
        return UserError.of("--port", f"port {port} is already in use on {host}", fix)
    if number == errno.EACCES:
        what = f"this user has no permission to listen on port {port}"
        return UserError.of("--port", what, "name a port above 1023")
    fix = "name an address of this machine, such as localhost, or 0.0.0.0 for all of its addresses"
    return UserError.of("--host", f"cannot listen on {host}: {error}", fix)
