"""`mar dashboard RUN...`: an HTTP server that keeps the pages of runs up to date.

    /                        the page, which requests the rest
    /state/<view>?have=TAG   parts and panels of a view as JSON; nothing if TAG is the newest
    /samples/<run>?...       samples of a run as JSON

A view is the number of a run, from 0, or `all` for the comparison.

Invariants:
- the server serves pages and samples of the runs named at its start and nothing else: no request
  names a file, and no request changes anything;
- it answers only requests for an address, for one of this machine's names or for an allowed name,
  so that a page of another site cannot read the runs through a name of its own (DNS rebinding);
- each line of a growing file is read once, and a view is rendered again only if a file of its runs
  changed;
- damage in a run's files is shown on its page, which continues to update.
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
LEAST_ZIPPED = 2_000
"""Number of bytes from which a response is compressed."""


class Dashboard:
    """Views of some runs, for the threads of a server."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """Raises UserError for a directory that is missing, repeated, or a folder of runs."""
        # Absolute, so that a relative and an absolute name of one run are recognised as equal.
        self._paths = [path.absolute() for path in run_dirs]
        for path in self._paths:
            if not path.is_dir():
                fix = "name the run.dir of a run; `mar train` makes it when it starts"
                raise UserError.of("RUN", f"{path} is not a directory", fix)
            # A folder of runs is the usual mistake, and its error can name the right command.
            within = [one for one in path.glob("*/metrics.jsonl") if one.is_file()]
            if within and not (path / "metrics.jsonl").exists():
                what = f"{path} is not a run, and has {len(within)} in it"
                raise UserError.of("RUN", what, f"name them: mar dashboard {path}/*/")
        if len(set(self._paths)) < len(self._paths):
            raise UserError.of("RUN", "a run is named twice", "name each run once")
        # One reader per run for the life of the server: it remembers what it has read.
        self._readers = [RunReader(path, alone=False) for path in self._paths]
        self._browsers = [SampleBrowser(path) for path in self._paths]
        self._made: dict[str, tuple[Hashable, str, bytes]] = {}
        """(fingerprint of its files, tag, state) by view."""
        # Readers keep positions in files, so one thread reads at a time.
        self._lock = Lock()

    @property
    def first_view(self) -> str:
        # The page of a single run has no comparison.
        return ALL if len(self._paths) > 1 else "0"

    def page(self) -> bytes:
        parts = {"TITLE": "Runs", "FOOTER": "The runs are being read."}
        return Page(parts=parts).as_html(live=self.first_view).encode()

    def state(self, view: str, have: str) -> bytes | None:
        """Return the state of a view; None if `have` is its tag. Raises KeyError for an unknown
        view."""
        if view not in self._views():
            raise KeyError(view)
        with self._lock:
            readers = self._readers if view == ALL else [self._readers[int(view)]]
            # Taken before reading: rows that are written meanwhile change the next fingerprint.
            now = tuple(reader.fingerprint() for reader in readers)
            made = self._made.get(view)
            # Rendering takes far longer than a stat of each file, and browsers poll every few
            # seconds.
            if made is None or made[0] != now:
                state, tag = self._make(view).as_state()
                made = self._made[view] = (now, tag, state)
        # Equal tags are answered without content: a finished run costs no transfer.
        return None if have == made[1] else made[2]

    def samples(self, view: str, query: dict[str, str]) -> bytes:
        """Return samples as JSON. Raises KeyError for a view that is not a run, and UserError as
        SampleBrowser."""
        if view not in self._views() or view == ALL:
            raise KeyError(view)
        with self._lock:
            # The browser's cache of columns is not thread-safe, either.
            return json.dumps(self._browsers[int(view)].answer(query)).encode()

    def _views(self) -> list[str]:
        numbers = [str(number) for number in range(len(self._paths))]
        return [ALL, *numbers] if len(numbers) > 1 else numbers

    def _make(self, view: str) -> Page:
        page = self._all() if view == ALL else self._one(int(view))
        return Page(parts={**page.parts, "RUNS": self._links()}, panels=page.panels)

    def _links(self) -> str:
        """Return links to all views; nothing for a single run."""
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
        # A run without a step is normal at its start; other errors are damage.
        except ReportError as error:
            return _waiting(reader.run_dir, _why(error))
        except UserError as error:
            return _broken(reader.run_dir, error)

    def _all(self) -> Page:
        runs: list[RunData | None] = []
        silent = []
        for name, reader in zip(names_of(self._paths), self._readers, strict=True):
            try:
                runs.append(reader.read())
            except UserError as error:
                # None keeps the place, so that names and colours of the other runs stay.
                runs.append(None)
                silent.append(f"<li>{html.escape(f'{name}: {_why(error)}')}</li>")
        compared = name_runs(self._paths, runs)
        try:
            page = page_of_runs(compared) if compared else Page(parts={"TITLE": "No step so far"})
        except UserError as error:
            page = _broken(self._paths[0].parent, error)
        if not silent:
            return page
        heading = "<h2>Runs that cannot be shown</h2>"
        missing = f'<section class="card wrong">{heading}<ul>{"".join(silent)}</ul></section>'
        return Page(parts={**page.parts, "WRONG": missing}, panels=page.panels)


def _why(error: UserError) -> str:
    """Return sentences with the file and its problem."""
    return ". ".join(
        one.what if one.key == "RUN" else f"{one.key} {one.what}" for one in error.problems
    )


def _waiting(run_dir: Path, why: str) -> Page:
    """Return the page of a run without a finished step."""
    try:
        parts = head(run_dir.name, str(run_dir), read_status(run_dir))
    except UserError as error:
        return _broken(run_dir, error)
    message = f'<section class="card"><h2>No step so far</h2><p>{html.escape(why)}.</p></section>'
    return Page(parts={**parts, "WRONG": message})


def _broken(run_dir: Path, error: UserError) -> Page:
    return Page(parts={**head(run_dir.name, str(run_dir), None), "ERROR": problem(str(error))})


class _DashboardServer(LimitedThreads, HTTPServer):
    def __init__(
        self, host: str, port: int, dashboard: Dashboard, allowed: Sequence[str] = ()
    ) -> None:
        """Listen on an address. `allowed` are additional host names that a browser may use."""
        # Resolved here: HTTPServer itself supports IPv4 alone.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # `localhost` may resolve to both families; every client can reach IPv4.
        found.sort(key=lambda one: one[0] != socket.AF_INET)
        self.address_family, address = found[0][0], found[0][4]
        self.dashboard = dashboard
        self.loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        # On a loopback address, the machine's public names cannot reach the server.
        own = () if self.loopback else (socket.gethostname(), socket.getfqdn())
        self.names = {_plain(name) for name in ("localhost", host, *own, *allowed)}
        super().__init__(address[:2], _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closed its connection. Other errors are answered with 500."""


class _Handler(BaseHTTPRequestHandler):
    server: _DashboardServer
    protocol_version = "HTTP/1.1"
    server_version = "mar"
    sys_version = ""
    # A client that sends nothing would otherwise occupy a thread forever.
    timeout = 60

    def do_GET(self) -> None:
        status, kind, content = self._answer()
        zipped = len(content) >= LEAST_ZIPPED and "gzip" in self.headers.get("Accept-Encoding", "")
        if zipped:
            # A low level: higher ones take longer and save little.
            content = gzip.compress(content, compresslevel=3)
        self.send_response(status)
        # no-store, because prompts may be confidential; the others keep foreign pages out.
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        # HEAD has the same headers and, by the standard, no body.
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Print nothing for a request."""

    def _answer(self) -> tuple[HTTPStatus, str, bytes]:
        """Return (status, content type, content)."""
        text, data = "text/plain", "application/json"
        # Checked before the path: a page of another site may use any path (DNS rebinding).
        name = _name_in(self.headers.get("Host", ""))
        if name not in self.server.names and not _is_address(name):
            known = " or ".join(sorted(one for one in self.server.names if not _is_address(one)))
            message = (
                f"the dashboard does not answer to the name {name!r}: open it by an address of its"
                f" machine or as {known}, or start it with --allow-host {name or 'NAME'}"
            )
            return HTTPStatus.FORBIDDEN, text, message.encode()
        requested = urlsplit(self.path)
        # The last value wins, as in a form that a browser sends twice.
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
        # An unknown view is an unknown page, which is answered below.
        except KeyError:
            pass
        except UserError as error:
            message = "; ".join(f"{one.key}: {one.what}: {one.fix}" for one in error.problems)
            return HTTPStatus.BAD_REQUEST, text, message.encode()
        except Exception as error:  # noqa: BLE001 - shown on the page; the server continues
            message = f"the dashboard failed: {type(error).__name__}: {error}"
            return HTTPStatus.INTERNAL_SERVER_ERROR, text, message.encode()
        return HTTPStatus.NOT_FOUND, text, b"there is no such page"


def _name_in(host: str) -> str:
    """Return the name in HOST or HOST:PORT, as a browser sends it; empty for anything else."""
    try:
        # The URL parser splits off the port and handles IPv6 brackets.
        return _plain(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return ""


def _plain(name: str) -> str:
    # Names of hosts ignore case, and a final dot marks a fully qualified name.
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
    """Serve until Ctrl-C. Port 0 takes a free port; `show` receives the address; `allowed` are
    additional host names that a browser may use.

    Raises UserError for a missing directory, an unavailable host or port, and an invalid name.
    """
    for name in allowed:
        # A URL or a name with a port would never match a Host header.
        if _name_in(name) != _plain(name):
            fix = "give the name alone, as in http://NAME:8470/, such as node7.example.org"
            raise UserError.of("--allow-host", f"{name!r} is not a host's name", fix)
    dashboard = Dashboard(run_dirs)
    try:
        server = _DashboardServer(host, port, dashboard, allowed)
    except (OSError, ValueError, OverflowError) as error:
        raise _unavailable(host, port, error) from error
    with server:
        name = f"[{host}]" if ":" in host else host
        show(f"http://{name}:{server.server_port}/  (Ctrl-C ends it)")
        if not server.loopback:
            show("note: anyone who reaches this address can read the runs and their samples")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _unavailable(host: str, port: int, error: Exception) -> UserError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        fix = "name another one, or --port 0 for a free one"
        return UserError.of("--port", f"port {port} is already in use on {host}", fix)
    if number == errno.EACCES:
        what = f"port {port} may not be opened by this user"
        return UserError.of("--port", what, "name one above 1023")
    fix = "name an address of this machine, such as localhost, or 0.0.0.0 for all of them"
    return UserError.of("--host", f"{host} cannot be listened on: {error}", fix)
