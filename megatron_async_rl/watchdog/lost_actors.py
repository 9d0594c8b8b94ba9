"""Content of Ray's texts about lost actors."""

from __future__ import annotations

import re

import psutil


def named_pids(text: str) -> list[int]:
    """Return the process that Ray's text names, if it names one."""
    return [int(pid) for pid in re.findall(r"^\s*pid: (\d+)$", text, re.MULTILINE)]


def was_here(text: str) -> bool:
    """Return False if Ray's text names another machine's address."""
    named = re.search(r"^\s*ip: (\S+)$", text, re.MULTILINE)
    addresses = (one.address for here in psutil.net_if_addrs().values() for one in here)
    # Without an address, assume that the process was here, as on one machine.
    return named is None or named[1] in addresses


def death_reason(text: str) -> str:
    """Return the name of the process, and Ray's reason, from a text of a dozen lines. Of the three
    causes that Ray guesses, two are impossible here."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    about = dict(
        line.split(": ", 1) for line in lines if re.match(r"(?:class_name|name|pid): ", line)
    )
    who = about.get("name") or about.get("class_name", "an actor")
    reason, guesses, _ = lines[-1].partition(" Some common causes include:")
    seen = (
        " Unless it was killed on purpose, `dmesg` shows whether the kernel did, for lack of"
        " memory." * bool(guesses)
    )
    return f"{who} (pid {about.get('pid', 'unknown')}). {reason}{seen}"
