"""Print the settings of pip as variables of uv, one `NAME=VALUE` per line; setup.sh exports them.

Reads the output of `pip config list` from standard input. Exits with 1, and prints the name on
standard error, if pip has a setting that this file cannot translate: uv would then install from
other places than pip.
"""

from __future__ import annotations

import ast
import os
import re
import sys

VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
"""Setting of pip -> variable of uv, and what separates several values there."""
NO_EFFECT = {
    *("break-system-packages", "cache-dir", "default-timeout", "disable-pip-version-check"),
    *(
        "exists-action",
        "no-cache-dir",
        "no-color",
        "no-compile",
        "no-input",
        "no-warn-script-location",
    ),
    *(
        "prefer-binary",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
    ),
    *("timeout", "verbose"),
}
"""Settings of pip that do not change what is installed."""
PRECEDENCE = ("global", "install", ":env:")


def variables(listed: str) -> dict[str, str]:
    """Return variables of uv. Raises ValueError, whose text is the setting, if one is unknown."""
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        matched = re.fullmatch(r"(\S+?)\.([^=]+)=(.*)", line)
        if matched is None or matched[1] not in PRECEDENCE:
            continue  # settings of other commands than `pip install`
        section, name, value = matched.groups()
        if name in NO_EFFECT:
            continue
        if name not in VARIABLES:
            raise ValueError(name)
        rank = PRECEDENCE.index(section)
        if name not in found or rank > found[name][0]:
            found[name] = rank, ast.literal_eval(value)
    result = {}
    for name, (_, value) in found.items():
        variable, separator = VARIABLES[name]
        result[variable] = separator.join(value.split())
    return result


def main() -> int:
    try:
        found = variables(sys.stdin.read())
    except ValueError as error:
        sys.stderr.write(f"uv is not used, because it lacks pip's setting {error}\n")
        return 1
    for name, value in found.items():
        # The user's own variables come first.
        if not os.environ.get(name):
            sys.stdout.write(f"{name}={value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
