"""Digest of a whole version of the weights. Loads no torch: the controller computes it, too."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def version_digest(digests: Mapping[str, str]) -> str:
    """Return 64 bits, as 16 hexadecimal digits, that depend on every tensor of a version. digests:
    of `digest_text`, by name, in any order."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
