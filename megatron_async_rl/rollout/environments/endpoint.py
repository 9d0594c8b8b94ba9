"""OpenAI-compatible endpoint of an engine: an existing agent becomes a rollout through its base
URL.

    process of the agent --POST {base_url}/chat/completions--> Agents --> the engine, turn by turn
          +---------------------- its reward ------------------> the sample

A session is one sample, identified by its base URL. The messages of the first call become the
prompt. A call that repeats all messages of a segment and appends messages continues that segment:
only the new messages are rendered, so token in, token out holds as for any sample (transcript.py).
If a caller disconnects before it receives the response and repeats the call, it receives the turn
that was already sampled. Any other call begins a new segment, up to
`rollout.environment.max_segments`: for example, the call of an agent that compacted its context or
started another agent.

Invariants:
- the server runs on the engine's event loop and listens only on the loopback address. The name of a
  session cannot be guessed, and becomes invalid when the agent ends. At most MAX_UNNAMED
  connections have not named a session yet; a further connection closes the oldest of them;
- a session processes one call at a time, across all segments;
- an agent may compute until its own time limit, whatever `watchdog.timeout_s` is: the watchdog
  permits a run without progress between the calls of an agent;
- the run determines sampling (rollout.sampling): temperature and similar keys of a call are
  ignored. A call that requests several samples or constrains sampling is refused; a call may
  shorten its turn with `max_tokens` and `stop`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from aiohttp import web

from megatron_async_rl.data.tokenizer import Tokenizer, unwritten_token
from megatron_async_rl.rollout.environments import UNREAD, UNREAD_CALLS, EpisodeStep, Message
from megatron_async_rl.rollout.environments.completions import (
    MODEL,
    CallRefused,
    ChatCompletion,
    completion,
    identity,
    read_call,
    write,
)
from megatron_async_rl.rollout.environments.episode import too_long
from megatron_async_rl.rollout.environments.pool import EnvironmentFailed, Environments
from megatron_async_rl.rollout.environments.transcript import (
    EpisodeMessages,
    SampleTurn,
    Transcript,
    TranscriptSegment,
    Turn,
    TurnRequest,
)
from megatron_async_rl.rollout.vllm.tool_parser import ToolParser
from megatron_async_rl.samples.types import Prompt

CLOSE_S = 0.5
"""Time limit for pending calls when the engine shuts down."""
MAX_REQUEST_BYTES = 64 * 2**20
"""Maximum bytes of a request."""
MAX_UNNAMED = 512
"""Maximum number of connections that have not named a session: each uses a file descriptor of the
engine. A connection of an agent counts until its first call is read."""


class _ChatSegment(TranscriptSegment):
    """Segment of a transcript, and its messages."""

    def __init__(self, prompt: Prompt, tools: Any) -> None:
        super().__init__(prompt)
        self.tools = tools
        self.history: list[Message] = []
        self.undelivered = False
        """True until the caller has received the last response."""

    def repeated(self, messages: Sequence[Message]) -> int:
        """Return the number of leading messages that the segment and `messages` share."""
        pairs = zip(self.history, messages, strict=False)
        equal = [identity(one) == identity(other) for one, other in pairs]
        return (*equal, False).index(False)

    def is_continued_by(self, messages: Sequence[Message], tools: Any) -> bool:
        """Return True if `messages` repeat all messages of the segment and append some."""
        return self.tools == tools and self.repeated(messages) == len(self.history) < len(messages)

    def is_retried_by(self, messages: Sequence[Message], tools: Any) -> bool:
        """Return True for a retry. After a delivered response, the same call is not a retry: it
        requests another response."""
        before = len(self.history) - 1
        return (
            self.undelivered
            and self.tools == tools
            and self.repeated(messages) == len(messages) == before
        )


class _Session:
    """Session of one sample: the state that the calls of its agent share."""

    def __init__(
        self,
        transcript: Transcript,
        sample: SampleTurn,
        max_tokens: int,
        environments: Environments,
    ) -> None:
        self.transcript, self._sample, self.max_tokens = transcript, sample, max_tokens
        self._environments = environments
        self.segments: list[_ChatSegment] = []
        self.lock = asyncio.Lock()
        self.refusal = ""
        """Reason for refusing the most recently refused call; empty if no call was refused."""
        self.ended = False
        self._calls = 0
        self._busy = ExitStack()
        """Holds the context `working_alone` while no call is pending."""

    def begin(self) -> None:
        """Start the time limit of the agent."""
        self._until = asyncio.get_running_loop().time() + self._environments.settings.timeout_s
        self._work_alone()

    def end(self) -> None:
        self.ended = True
        self._busy.close()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Mark the agent as waiting for the model."""
        self._busy.close()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            # With concurrent calls, the agent works alone only after the last of them.
            if not self._calls and not self.ended:
                self._work_alone()

    def _work_alone(self) -> None:
        left_s = self._until - asyncio.get_running_loop().time()
        self._busy.enter_context(self._environments.working_alone(left_s))

    async def sample(self, requested: TurnRequest) -> Turn:
        """Sample a turn. Raises CallRefused if the agent has ended."""
        turn = None if self.ended else await self._sample(requested)
        # The agent may have ended during sampling; its sample must not get an abandoned turn.
        if turn is None or self.ended:
            raise CallRefused("the session's agent has ended")
        return turn

    def with_refusal(self, error: str) -> str:
        """Return the error message, followed by the refusal that may have caused the error."""
        complete = not self.refusal or self.refusal in error
        return error if complete else f"{error} (a call was refused: {self.refusal})"


class _Connections:
    """Factory of aiohttp's connections. It limits the connections that have not named a session."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._unnamed: dict[web.RequestHandler, None] = {}
        """Connections that have not named a session, oldest first. A closed connection stays until
        newer connections displace it."""

    def __call__(self) -> web.RequestHandler:
        while len(self._unnamed) >= MAX_UNNAMED:
            oldest = next(iter(self._unnamed))
            self._unnamed.pop(oldest)
            # Agents of the run name their session immediately; only foreign connections age.
            oldest.force_close()
        connection = self._server()
        self._unnamed[connection] = None
        return connection

    def admit(self, connection: web.RequestHandler) -> None:
        self._unnamed.pop(connection, None)


class Agents:
    """Endpoint of one engine, on one event loop. Call `start` first."""

    def __init__(
        self, environments: Environments, tokenizer: Tokenizer, parser: ToolParser
    ) -> None:
        """Raises DataError if the chat template does not permit a second turn."""
        self._environments = environments
        self._parser = parser
        self._tokenizer = tokenizer
        self._follow = EpisodeMessages(tokenizer)
        self._sessions: dict[str, _Session] = {}
        self._runner: web.AppRunner | None = None
        self._connections: _Connections | None = None
        self._listener: asyncio.Server | None = None
        self._url = ""

    async def start(self) -> None:
        # Bounded: an agent may run code that the model wrote, and its requests use engine memory.
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/session/{name}/v1/chat/completions", self._complete)
        app.router.add_get("/session/{name}/v1/models", self._models)
        app.router.add_get("/session/{name}/v1/models/{model}", self._models)
        app.router.add_route("*", "/session/{name}/{path:.*}", self._unknown_path)
        app.router.add_route("*", "/{path:.*}", self._unknown_path)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = _Connections(self._runner.server)
        loop = asyncio.get_running_loop()
        # Port 0 selects a free port, so that engines on one machine do not collide.
        self._listener = await loop.create_server(self._connections, "127.0.0.1", 0)
        self._url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def play(self, transcript: Transcript, sample: SampleTurn, max_tokens: int) -> str | None:
        """Run the agent, whose calls fill `transcript`. Return the reason if the agent failed."""
        session = _Session(transcript, sample, max_tokens, self._environments)
        # Unguessable: sampled code on this machine must not write into another sample.
        name, process = secrets.token_urlsafe(16), None
        try:
            process = await self._environments.open()
            self._sessions[name] = session
            session.begin()
            reward = await process.run(transcript.requested, f"{self._url}/session/{name}/v1")
        except EnvironmentFailed as error:
            # Not a failure: agents often raise when the context is full. The sample is usable.
            if transcript.truncated and transcript.turns:
                return None
            return session.with_refusal(str(error))
        finally:
            # Before the process is closed, so that late calls are refused.
            self._sessions.pop(name, None)
            session.end()
            if process is not None:
                await process.close()
        if not transcript.turns:
            return session.with_refusal("the agent ended without a turn of the model")
        # The last turn gets the reward of the whole run.
        transcript.segments[-1].take_step(EpisodeStep(reward=reward, done=True))
        return None

    def _session(self, request: web.Request) -> _Session:
        """Return the session that the URL names. Raises CallRefused if it does not exist."""
        session = self._sessions.get(request.match_info.get("name", ""))
        if session is None:
            raise CallRefused("the session does not exist, or its agent has ended", status=404)
        if self._connections is not None:
            self._connections.admit(request.protocol)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_async_rl"}
        try:
            self._session(request)
        except CallRefused as error:
            return error.response
        if "model" in request.match_info:
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown_path(self, request: web.Request) -> web.Response:
        """Respond with status 404 to a request for any other path."""
        error = CallRefused(
            f"{request.method} {request.path}: the endpoint has only POST BASE_URL/chat/completions"
            " and GET BASE_URL/models; the BASE_URL of an agent ends with /v1",
            status=404,
        )
        session = self._sessions.get(request.match_info.get("name", ""))
        if session is not None:
            session.refusal = str(error)
        return error.response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session: _Session | None = None
        try:
            session = self._session(request)
            requested = read_call(await _body(request), self._parser)
            with session.call():
                # One call at a time: each turn changes the segments that the next call may
                # continue.
                async with session.lock:
                    segment = await self._sample_response(session, requested)
                    decode = self._tokenizer.decode if requested.logprobs else None
                    turn, message = segment.turns[-1], segment.history[-1]
                    answer = completion(turn, message, len(segment.ids), decode)
                    # Until the response is written, a retry of this call must receive the same
                    # turn.
                    segment.undelivered = True
            response = await write(request, answer, requested)
            segment.undelivered = False
            return response
        except CallRefused as error:
            if session is not None:
                session.refusal = str(error)
            return error.response
        # The caller disconnected; its retry will receive the turn.
        except ConnectionError:
            return web.Response(status=400)

    async def _sample_response(self, session: _Session, requested: ChatCompletion) -> _ChatSegment:
        """Return the segment whose last turn is the response to the call. Raises CallRefused before
        anything is sampled."""
        messages, tools = requested.messages, requested.tools
        for text in requested.stop:
            if (token := unwritten_token(self._tokenizer, text)) is not None:
                raise CallRefused(
                    f"stop {text!r} contains the special token {token}, which decoded text omits;"
                    " leave it out, or set rollout.sampling.stop_token_ids in the config of the run"
                )
        transcript, limit = session.transcript, self._environments.settings.max_turns
        for one in session.segments:
            if one.is_retried_by(messages, tools):
                return one
        segment = next(
            (one for one in session.segments if one.is_continued_by(messages, tools)), None
        )
        content: list[int] = []
        if segment is not None:
            new = [dict(one) for one in messages[len(segment.history) :]]
            sampled = segment.turns[-1].tokens.response_ids.tolist()
            # Before tokenization, which would block the event loop for a huge message.
            if too_long(new, transcript.room(segment, session.max_tokens)):
                raise self._limit_refusal(session)
            content = _rendered(self._follow.between, sampled, new)
            step = EpisodeStep(observation=new)
        else:
            segment, step = self._new_segment(session, messages, tools), None
        room = transcript.room(segment, session.max_tokens) - len(content)
        if room < 1 or len(transcript.turns) == limit:
            raise self._limit_refusal(session, turns=room >= 1)
        if step is not None:
            # After the checks, so that a refused call adds no text, even if it is repeated.
            segment.take_step(step)
        maximum = min(room, requested.maximum or room)
        turn = await transcript.extend(segment, content, session.sample, maximum, requested.stop)
        # Assigned, not only set to True: after a full history, the agent may continue with a
        # shorter one.
        transcript.truncated = turn.reason == "length" and maximum == room
        # Sampled tokens may extend beyond a stop string; the agent reads the text before it.
        text = min(
            (turn.text.partition(stop)[0] for stop in requested.stop), key=len, default=turn.text
        )
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if requested.reads_calls:
            message = self._parser.message(turn.tokens.response_ids.tolist(), text, tools)
        # The agent receives plain text, as from any server.
        unread = message.pop(UNREAD, None)
        if tools and requested.reads_calls:
            transcript.measured.update({UNREAD_CALLS: float(unread is not None)})
        # Only after sampling: a refused or aborted call must leave no segment.
        if segment not in session.segments:
            session.segments.append(segment)
        segment.history = [*messages, message]
        return segment

    def _limit_refusal(self, session: _Session, *, turns: bool = False) -> CallRefused:
        """Return the refusal for a full sample. `turns`: True if the sample has reached its limit
        on turns, False for its limit on tokens."""
        session.transcript.truncated = True
        key = (
            f"rollout.environment.max_turns: {self._environments.settings.max_turns}"
            if turns
            else f"rollout.sampling.max_tokens: {session.max_tokens}"
        )
        # OpenAI's error code, after which agents end or compact their context.
        code = "context_length_exceeded"
        return CallRefused(f"{code}: the sample is at its limit, {key}", code=code)

    def _new_segment(
        self, session: _Session, messages: Sequence[Message], tools: Any
    ) -> _ChatSegment:
        """Return a new segment. Raises CallRefused if the sample has reached its limit on
        segments."""
        maximum = self._environments.settings.max_segments
        if len(session.segments) == maximum:
            nearest = max(session.segments, key=lambda one: one.repeated(messages))
            place = nearest.repeated(messages)
            what = (
                "its tools differ from the tools of the previous call"
                if place == len(nearest.history) < len(messages)
                else f"messages[{place}] differs, or no message follows"
            )
            raise CallRefused(
                f"the call does not repeat the earlier messages and append new ones: {what}. It"
                f" would begin segment {maximum + 1} of the sample;"
                f" rollout.environment.max_segments: {maximum}"
            )
        requested = session.transcript.requested
        if too_long(messages, len(requested.token_ids) + session.max_tokens):
            raise self._limit_refusal(session)
        text = _rendered(self._tokenizer.render_chat, messages, answer=True, tools=tools)
        ids = tuple(_rendered(self._tokenizer.encode_rendered, text))
        return _ChatSegment(
            Prompt(id=requested.id, text=text, token_ids=ids, fields=requested.fields), tools
        )


async def _body(request: web.Request) -> Any:
    """Return the JSON body. Raises CallRefused."""
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the call is not a JSON object: {error}") from None
    except web.HTTPRequestEntityTooLarge:
        raise CallRefused(
            f"the call has more than {MAX_REQUEST_BYTES // 2**20} MiB", status=413
        ) from None


def _rendered[Result](render: Callable[..., Result], *messages: Any, **options: Any) -> Result:
    """Render messages. Raises CallRefused for any exception: the template is a program, and the
    agent chooses its input."""
    try:
        return render(*messages, **options)
    except Exception as error:
        raise CallRefused(f"the messages cannot be rendered: {error}") from error
