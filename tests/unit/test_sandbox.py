"""The sandbox of unread programs, and the reward that runs a response's code in it: what a program
may not do it cannot do, and nothing it does makes a test pass."""

import os
import socket
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async_rl.rollout.rewards import code as code_module
from megatron_async_rl.rollout.rewards import sandbox
from megatron_async_rl.rollout.rewards.code import code, source_of
from megatron_async_rl.rollout.rewards.registry import RewardError, load_reward
from megatron_async_rl.rollout.rewards.sandbox import Ended, Limits, SandboxError, run
from megatron_async_rl.samples import Prompt


def printed(source: str, **limits: Any) -> str:
    ended = run(source, limits=Limits(**limits))
    assert ended.code == 0
    return ended.output


def test_a_program_reads_and_prints_and_may_use_the_standard_library() -> None:
    source = "import decimal, sqlite3, ssl, threading\nprint(int(input()) + 1, __name__)"
    assert run(source, stdin="41\n") == Ended(code=0, output="42 __main__\n")
    assert run("raise SystemExit(3)") == Ended(code=3, output="")


def test_it_sees_no_file_of_the_machine_and_writes_none(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    source = f"""
import os
def attempt(do):
    try:
        return do()
    except OSError:
        return "refused"
places = ["/etc/passwd", {str(secret)!r}, {os.getcwd()!r} + "/setup.py", "/proc/self/environ"]
print([attempt(lambda: open(one).read()) for one in places])
print([attempt(lambda: open(one + "/x", "w")) for one in ("", "/dev", os.path.dirname(os.__file__))])
print(attempt(lambda: os.mkdir({str(tmp_path)!r} + "/x")), os.getcwd(), os.listdir("."))
print(attempt(lambda: open("mine", "w").write("ab")))
print(attempt(lambda: os.open(os.__file__, os.O_RDWR)), os.getuid() == 0)
"""
    assert printed(source).splitlines() == [
        str(["refused"] * 4),
        str(["refused"] * 3),
        "refused /tmp []",
        "2",
        "refused False",
    ]
    assert [one.name for one in tmp_path.iterdir()] == ["secret"]


def test_it_inherits_no_variable_and_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        source = """
import os
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
print(sorted(os.environ), [fd for fd in range(64) if is_open(fd)])
"""
        assert printed(source) == "['HOME', 'LANG', 'PATH'] [0, 1, 2]\n"


def test_it_has_no_network_not_even_this_machine() -> None:
    name = uuid.uuid4().hex
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        source = f"""
import socket
for kind, place in (
    (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
    (socket.AF_INET, ("192.0.2.1", 80)),
    (socket.AF_UNIX, "\\x00{name}"),
):
    try:
        socket.socket(kind).connect(place)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""
        said = printed(source).split()
    assert said == ["OSError", "OSError", "ConnectionRefusedError"]


def test_it_gains_no_rights_and_sees_no_process_but_its_own() -> None:
    source = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def refused(call):
    try:
        call()
    except OSError:
        return True
    return False
print(os.getpid() < 10, refused(lambda: os.setuid(0)), refused(lambda: os.setresuid(0, 0, 0)))
print(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/tmp", 2), os.getppid())
print(libc.sethostname(b"x", 1), libc.ptrace(16, 1, 0, 0))
"""
    assert printed(source).splitlines() == ["True True True", "-1 -1 1", "-1 -1"]


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
@pytest.mark.parametrize("ends", ["", "time.sleep(600)"])
def test_nothing_it_started_outlives_it(isolation: Any, ends: str) -> None:
    """A daemon in a session of its own, of a parent that has ended."""
    mark = f"daemon-{uuid.uuid4().hex}"
    source = f"""
import ctypes, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"{mark[:15]}", 0, 0, 0)
        time.sleep(600)
    os._exit(0)
os.wait()
print("started", flush=True)
{ends}
"""
    ended = run(source, limits=Limits(isolation=isolation, wall_s=1.5 if ends else 60))
    assert ended == Ended(code=None if ends else 0, output="started\n")
    assert [one for one in psutil.process_iter(["name"]) if one.info["name"] == mark[:15]] == []


@pytest.mark.parametrize(
    ("source", "code", "most"),
    [
        ("while True: pass", None, 0),
        ("x = bytearray(2**30)", 1, 0),
        ("while True: print('x' * 10**6)", 1, 2**20),
        ("import os\nwhile True: os.write(1, b'x' * 10**6)", 1, 2**20),
        ("open('a', 'wb').write(bytes(2**21))", 1, 0),
        ("import os\nos.closerange(0, 64)\nos._exit(0)", 0, 0),
        ("import os\nos.kill(os.getpid(), 11)", 139, 0),
    ],
)
def test_what_it_takes_is_bounded(source: str, code: int | None, most: int) -> None:
    ended = run(source, limits=Limits(cpu_s=1, memory_mib=256, file_mib=1))
    assert (ended.code, len(ended.output)) == (code, most)


def test_a_fork_bomb_stays_small() -> None:
    source = """
import os, time
started = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(600)
        started += 1
    except BlockingIOError:
        break
print(started)
"""
    # As nobody is root: launcher and init are the same user, and count.
    assert int(printed(source, processes=8)) in (7, 9)


def test_walls_that_cannot_stand_are_said_and_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a container forbids namespaces."""
    program = tmp_path / "program.py"
    refuse = "import os\ndef refused(_): raise PermissionError(1, 'Operation not permitted')\n"
    text = Path(sandbox._PROGRAM).read_text()
    program.write_text(f"{refuse}os.unshare = refused\n{text}")
    monkeypatch.setattr(sandbox, "_PROGRAM", program)
    with pytest.raises(SandboxError, match="Operation not permitted"):
        run("print(1)")
    with pytest.raises(RewardError, match=r"isolation: .*--cap-add SYS_ADMIN.*isolation: limits"):
        load_reward("code")
    assert load_reward("code", {"isolation": "limits"}).settings == {"isolation": "limits"}
    assert printed("print(1)", isolation="limits") == "1\n"


ASSERTS = ["assert f(2) == 4", "assert f(3) == 9"]
SQUARE = "def f(x): return x * x"


def score(source: str, tests: Any, entry_point: str | None = None, **settings: Any) -> float:
    fields = {"tests": tests, "entry_point": entry_point}
    prompt = Prompt(id="p7", text="?", token_ids=(1,), fields=fields)
    return code(prompt, source, **({"timeout_s": 300.0} | settings))


def test_the_last_block_of_python_is_the_program() -> None:
    assert source_of("x = 1") == "x = 1"
    assert source_of("a\n```python\n1\n```\nthen\n```\n2\n```\nend") == "2\n"
    assert source_of("```bash\nls\n```") == "```bash\nls\n```"


@pytest.mark.parametrize(
    ("source", "tests", "reward"),
    [
        ("print(sum(map(int, input().split())))", [("1 2", "3"), ("5 5\n", " 10 \n\n")], 1.0),
        ("print(3)", [("1 2", "3"), ("5 5", "10")], 0.0),
        ("print(3)\n1/0", [("1 2", "3")], 0.0),
        (SQUARE, ASSERTS, 1.0),
        (SQUARE, "\n".join(ASSERTS), 1.0),
        ("def f(x): return 4", ASSERTS, 0.0),
        ("def f(x): x.sort()", "l = [2, 1]\nf(l)\nassert l == [1, 2]", 1.0),
        ("def f(x): raise KeyError(x)", "try: f(1)\nexcept KeyError: pass\nelse: assert 0", 1.0),
        (
            "class S:\n  def __init__(s): s.l = []\n  def push(s, x): s.l.append(x)\n"
            "  def pop(s): return s.l.pop()",
            "s = S()\ns.push((1, {2}))\nassert s.pop() == (1, {2})",
            1.0,
        ),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]", 1.0),
        (SQUARE, "def test_it():\n  assert f(2) == 5", 0.0),
    ],
)
def test_code_is_right_when_it_passes_every_test(source: str, tests: Any, reward: float) -> None:
    if isinstance(tests, list) and isinstance(tests[0], tuple):
        tests = [{"input": one, "output": other} for one, other in tests]
    assert score(source, tests) == reward


def test_a_check_function_is_called_with_the_entry_point() -> None:
    check = "def check(candidate):\n  assert candidate(2) == 4"
    assert score(SQUARE, check, "f") == 1.0
    assert score("def f(x): return 5", check, "f") == 0.0


def test_partial_is_the_share_of_the_tests() -> None:
    assert score("def f(x): return 4", ASSERTS, partial=True) == 0.5
    pairs = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    assert score("print(1)", pairs, partial=True) == 0.5


ALWAYS = "class A:\n  def __eq__(s, o): return True\n  __bool__ = lambda s: True\n"


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "def f(x):\n  import os\n  os._exit(0)",
        f"{ALWAYS}def f(x): return A()",
        "class I(int):\n  def __eq__(s, o): return True\ndef f(x): return I(0)",
        "import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 0",
        "print('[true, true]', flush=True)\nimport os\nos._exit(0)",
        "import os\nfor n in range(1, 64):\n  try: os.write(n, b'[true, true]\\n')\n"
        "  except OSError: pass\nos._exit(0)",
        "import gc\nfor o in gc.get_objects():\n  if type(o) is list and o and "
        "isinstance(o[0], str): o[:] = ['']\ndef f(x): return 0",
        "def f(x): return f",
        "def f(x):\n  while True: pass",
        "def f(x): return [0] * 10**7",
        "def f(x):\n  l = []\n  for _ in range(10**5): l = [l]\n  return l",
        "def f(x): raise AssertionError",
        "def f(x): return float('nan')",
        "",
        "def f(:",
    ],
)
def test_no_trick_of_the_code_makes_an_assert_pass(source: str) -> None:
    assert score(source, ASSERTS, cpu_s=1.0) == 0.0


def test_a_program_cannot_find_the_output_that_is_expected() -> None:
    source = """
import gc, sys
frame = sys._getframe()
seen = ""
while frame:
    seen += str(frame.f_locals) + str(frame.f_globals)
    frame = frame.f_back
print("expected-" + "4711" if "4711" * 2 in seen + str(sys.argv) + str(gc.get_objects()) else "no")
"""
    assert score(source, [{"input": "x", "output": "expected-47114711"}]) == 0.0


@pytest.mark.parametrize(
    "tests",
    [None, "", [], 3, ["f(2)"], [{"input": "1"}], {"fn_name": "f", "inputs": [], "outputs": []}],
)
def test_code_names_the_prompt_without_tests(tests: Any) -> None:
    with pytest.raises(RewardError, match="prompt p7: `tests` is"):
        score(SQUARE, tests)


def test_code_that_sleeps_is_wrong_and_code_that_was_starved_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps = "import time\ntime.sleep(600)"
    assert score(sleeps, [{"input": "", "output": "1"}], timeout_s=1.5) == 0.0
    monkeypatch.setattr(code_module, "WALL_PER_CPU", 0.05)
    with pytest.raises(sandbox.Starved, match="the machine is busy"):
        score("while True: pass", [{"input": "", "output": "1"}], cpu_s=10.0)
