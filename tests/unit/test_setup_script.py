"""`make setup` takes Python 3.12 or nothing, and CPU torch where one is served; interpreters, pip
and uv are stand-ins that write down what they were asked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    "bash",
    "cat",
    "cp",
    "cut",
    "dirname",
    "grep",
    "ls",
    "mkdir",
    "realpath",
    "rm",
    "sed",
    "sha256sum",
    "touch",
)
INTERPRETER = """#!{bash}
echo "$0 $*" >> {asked}
case "$*" in
  *"-m uv"*) others="${{UV_INDEX:-}}, ${{UV_FIND_LINKS:-}}"
    echo "index ${{UV_DEFAULT_INDEX:-}}, others $others" >> {asked}.uv ;;&
  *"-m uv"*) [[ -z "${{BROKEN_UV:-}}" ]] || exit 2 ;;&
  *"config list") echo "${{PIP_SETTINGS:-}}" ;;
  launchers/uv_settings.py) exec {real} "$@" ;;
  *" uv=="*) [[ -z "${{NO_UV:-}}" ]] ;;
  *"torch=="*) [[ -z "${{INTERRUPTED:-}}" ]] || {{ kill -INT $PPID; exit 1; }} ;;&
  -c*) exec {real} -c "import sys; sys.version_info = ({numbers}); exec(sys.argv[1])" "$2" ;;
  --version) echo "Python {version}.0" ;;
  "-m venv --clear"*) rm -rf "$VENV"; mkdir -p "$VENV" ;;
  "-m venv"*) [[ -z "${{BROKEN_VENV:-}}" ]] || exit 1 ;;&
  "-m venv"*) mkdir -p "$VENV/bin"; cp "$0" "$VENV/bin/python" ;;
  *--dry-run*--index-url*) [[ " {served} " == *" index "* ]] ;;
  *--dry-run*) [[ " {served} " == *" configured "* ]] ;;
  *dev.txt*) [[ -z "${{BROKEN_REQUIREMENT:-}}" ]] ;;
esac
"""


DF = """#!{bash}
[[ -z "${{BROKEN_DF:-}}" ]] || exit 1
echo "Filesystem 1000000-blocks Used Available Capacity Mounted on"
echo "map of a disk 252000 90000 ${{FREE_MB:-99000}} 90% /a folder"
"""


class Machine:
    """Environment of the set-up: interpreters, by path under `folder`, and the server of CPU
    torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = folder / "asked"
        (folder / "bin").mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found
            (folder / "bin" / tool).symlink_to(found)
        (folder / "bin" / "df").write_text(DF.format(bash=shutil.which("bash")))
        (folder / "bin" / "df").chmod(0o755)

    def has(self, path: str, version: str, served: str = "") -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            INTERPRETER.format(
                bash=shutil.which("bash"),
                asked=self.asked,
                real=sys.executable,
                version=version,
                numbers=version.replace(".", ", "),
                served=served,
            )
        )
        file.chmod(0o755)

    def set_up(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "launchers" / "setup.sh"],
            env={
                "PATH": str(self.folder / "bin"),
                "VENV": str(self.folder / "venv"),
                "PYENV_ROOT": str(self.folder / "pyenv"),
                "HOME": str(self.folder),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=600,
        )

    def installs(self) -> list[str]:
        """Arguments of pip's installs that were not only tries."""
        return [
            line.partition(" install ")[2]
            for line in self.asked.read_text().splitlines()
            if " install " in line and "--dry-run" not in line
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_python_312_gets_the_command_to_install_it(machine: Machine) -> None:
    machine.has("bin/python3", "3.11")
    machine.has("bin/python3.12", "3.11")  # a shim whose version is switched off fails like this
    done = machine.set_up()
    assert done.returncode == 1
    assert "no Python 3.12" in done.stderr
    assert not (machine.folder / "venv").exists()


def test_an_interpreter_that_was_named_is_taken_or_refused(machine: Machine) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    machine.has("own/python", "3.11")
    refused = machine.set_up(PYTHON=str(machine.folder / "own" / "python"))
    assert refused.returncode == 1
    assert "own/python" in refused.stderr
    assert not (machine.folder / "venv").exists()

    machine.has("own/python", "3.12", served="configured")
    assert machine.set_up(PYTHON=str(machine.folder / "own" / "python")).returncode == 0
    assert f"{machine.folder}/own/python -m venv" in machine.asked.read_text()


@pytest.mark.parametrize(
    "path", ["bin/python3.12", "bin/python3", "pyenv/versions/3.12.1/bin/python"]
)
def test_python_312_is_found_on_the_path_and_in_pyenvs_folder(machine: Machine, path: str) -> None:
    machine.has("bin/python3.11", "3.11")
    machine.has(path, "3.12", served="configured")
    done = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert f"{machine.folder}/{path} -m venv" in machine.asked.read_text()


@pytest.mark.parametrize(
    ("served", "taken"),
    [
        ("configured", "torch=={}+cpu"),
        ("index", "--index-url http://mirror torch=={}+cpu"),
        ("", "torch=={} -r requirements/nvidia.txt"),
    ],
)
def test_cpu_torch_is_taken_where_it_is_served(machine: Machine, served: str, taken: str) -> None:
    lock = (ROOT / "requirements" / "cpu.txt").read_text()
    (torch,) = (line for line in lock.splitlines() if line.startswith("torch=="))
    version = torch.removeprefix("torch==").removesuffix("+cpu")
    machine.has("bin/python3.12", "3.12", served=served)
    done = machine.set_up(TORCH_CPU_INDEX="http://mirror")
    assert done.returncode == 0, done.stderr
    (installed,) = (line for line in machine.installs() if "torch==" in line)
    assert installed.endswith(taken.format(version))
    assert ("NVIDIA libraries" in done.stdout) == (served == "")

    asked = machine.asked.read_text()
    assert machine.set_up().returncode == 0
    assert machine.asked.read_text() == asked, "a second set-up has nothing to do"


@pytest.mark.parametrize(("served", "needed"), [("configured", 5), ("index", 5), ("", 8)])
def test_a_disk_that_is_too_small_is_reported_before_anything_is_installed(
    machine: Machine, served: str, needed: int
) -> None:
    machine.has("bin/python3.12", "3.12", served=served)
    full = machine.set_up(FREE_MB=str(1000 * needed - 1))
    assert full.returncode == 1
    assert f"needs {needed} GB, and its disk has {needed - 1}.9 GB free" in full.stderr
    assert not any("torch==" in line for line in machine.installs())
    assert machine.set_up(FREE_MB=str(1000 * needed)).returncode == 0
    shutil.rmtree(machine.folder / "venv")
    assert machine.set_up(BROKEN_DF="yes").returncode == 0, "unknown is not too small"


def test_a_folder_that_is_no_environment_of_the_script_keeps_its_files(machine: Machine) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    folder = machine.folder / "venv"
    (folder / "photos").mkdir(parents=True)
    refused = machine.set_up()
    assert refused.returncode == 1
    assert "exists and was not made by this script" in refused.stderr
    assert (folder / "photos").is_dir()
    (folder / "photos").rmdir()
    assert machine.set_up(BROKEN_VENV="yes").returncode == 1
    assert machine.set_up(INTERRUPTED="yes").returncode == 130
    assert machine.set_up().returncode == 0, "an interrupted set-up begins again"
    (folder / ".made-by-setup").unlink()
    for ready in folder.glob(".ready-*"):
        ready.rename(folder / ".ready-other")
    assert machine.set_up().returncode == 0, "environments of earlier versions have no such file"


def test_every_requirement_but_torch_is_installed_at_once(machine: Machine) -> None:
    lock = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    machine.has("bin/python3.12", "3.12", served="configured")
    assert machine.set_up().returncode == 0
    (line,) = (one for one in machine.installs() if "others.txt" in one)
    assert line.endswith(f"-r {machine.folder}/venv/others.txt -r requirements/dev.txt")
    installed = (machine.folder / "venv" / "others.txt").read_text().splitlines()
    assert installed == [one for one in lock if not one.startswith(("torch==", "uv=="))]


def test_uv_installs_from_where_pip_is_told_to(machine: Machine) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    settings = """:env:.find-links='/wheels /more'
download.no-index='1'
global.extra-index-url='\\nhttp://one\\nhttp://two'
global.find-links='/other'
global.index-url='http://global/simple'
global.timeout='9'
install.index-url="http://it's/simple\""""
    assert machine.set_up(PIP_SETTINGS=settings).returncode == 0
    said = Path(f"{machine.asked}.uv").read_text().splitlines()
    assert set(said) == {"index http://it's/simple, others http://one http://two, /wheels,/more"}
    assert not any("-m pip" in line for line in machine.installs() if "uv==" not in line)


def test_a_variable_of_uv_precedes_pips_setting(machine: Machine) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    settings = "global.index-url='http://mirror/simple'"
    assert machine.set_up(PIP_SETTINGS=settings, UV_DEFAULT_INDEX="http://own").returncode == 0
    assert "index http://own," in Path(f"{machine.asked}.uv").read_text()


@pytest.mark.parametrize("setting", ["no-index='true'", "trusted-host='here'"])
def test_pip_installs_if_it_has_a_setting_that_uv_lacks(machine: Machine, setting: str) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    assert machine.set_up(PIP_SETTINGS=f"global.{setting}").returncode == 0
    assert "-m uv" not in machine.asked.read_text()
    assert (
        f"pip's setting {setting.partition('=')[0]}"
        in (machine.folder / "venv" / "uv.log").read_text()
    )


@pytest.mark.parametrize("missing", ["BROKEN_UV", "NO_UV"])
def test_where_uv_fails_or_is_not_served_pip_installs(machine: Machine, missing: str) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    done = machine.set_up(**{missing: "yes"})
    assert done.returncode == 0
    assert ("uv failed (its output:" in done.stdout) == (missing == "BROKEN_UV")
    asked = [one for one in machine.asked.read_text().splitlines() if "--dry-run" not in one]
    assert sum("-m uv pip" in one for one in asked) == (1 if missing == "BROKEN_UV" else 0)
    for what in ("torch==", "others.txt", "tasks.txt", "--editable ."):
        assert any("-m pip -qq" in one and what in one for one in asked)


def test_an_interruption_that_pip_handles_ends_the_set_up(machine: Machine) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    done = machine.set_up(INTERRUPTED="yes")
    assert done.returncode == 130
    assert "others.txt" not in machine.asked.read_text()
    assert not list((machine.folder / "venv").glob(".ready-*"))


def test_a_requirement_that_cannot_be_had_ends_the_set_up(machine: Machine) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    assert machine.set_up(BROKEN_REQUIREMENT="yes").returncode == 1
    assert not list((machine.folder / "venv").glob(".ready-*"))
    assert machine.set_up().returncode == 0
    assert list((machine.folder / "venv").glob(".ready-*"))


def test_an_image_goes_without_what_only_tests_and_lint_need(machine: Machine) -> None:
    machine.has("bin/python3.12", "3.12", served="configured")
    assert machine.set_up(DEV="").returncode == 0
    assert not any("dev.txt" in line for line in machine.installs())
    asked = machine.asked.read_text()
    assert machine.set_up(DEV="").returncode == 0
    assert machine.asked.read_text() == asked
    assert machine.set_up().returncode == 0
    assert any("dev.txt" in line for line in machine.installs()), "that one was not whole"
