"""Encrypts texts by the key of a subject, and makes keyed hashes of texts.

AES-256 in Galois/counter mode (NIST SP 800-38D), with nonces that are keyed hashes of what is encrypted.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat

import numpy as np
import pyarrow as pa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from omnisupport_ingest.contracts.recent_keys import SECRET_BYTES

KEY_BYTES = SECRET_BYTES // 2
"""Bytes of a key of AES-256, and of a key of BLAKE2b."""

NONCE_BYTES = 12
"""Bytes of a nonce of AES-GCM (NIST SP 800-38D, 8.2)."""

DIGEST = r'"[0-9a-f]{16}"\]$'
"""Matches the end of an identity that holds a hash of what was delivered. For Python and for RE2."""

_MOST_LETTERS = int(np.iinfo(np.int32).max)
"""The most bytes that one Arrow array of texts can hold."""


@dataclass(slots=True)
class SubjectKey:
    """The key of one subject. ``secret`` is None once it is destroyed."""

    id: bytes
    secret: bytes | None = field(repr=False)
    _cipher: AESGCM | None = field(default=None, init=False, repr=False, compare=False)

    def encrypted(self, text: bytes, of: bytes) -> bytes:
        """Return ``text`` encrypted: key id, nonce and AES-GCM body. The key must not be destroyed.

        The nonce is a keyed hash of ``of`` (the table) and ``text``. So the same text of the same subject and
        table has the same result, and nothing but this equality is revealed (synthetic nonces: RFC 5297,
        1.3.3).
        """
        return a2b_base64(encrypt_each([self], pa.array([text], pa.binary()), of)[0].as_py())

    def decrypted(self, body: bytes, of: bytes) -> bytes:
        """Return the text from which ``encrypted`` made ``body`` (without its id).

        Raises ``InvalidTag`` if this key did not make ``body`` for the table ``of``.
        """
        if self._cipher is None:
            assert self.secret is not None, "the key is not destroyed"
            self._cipher = AESGCM(self.secret[:KEY_BYTES])
        return self._cipher.decrypt(body[:NONCE_BYTES], body[NONCE_BYTES:], of)


def encrypt_each(
    keys: Iterable[SubjectKey], texts: pa.StringArray | pa.BinaryArray, of: bytes
) -> pa.StringArray:
    """Return each of ``texts`` encrypted by its key as ``SubjectKey.encrypted`` does, in base64; empty if the
    key is destroyed.

    Most of the cost of encrypted landing is here, so it is one loop and one call of base64.
    """
    bodies: list[bytes] = []
    begin = of + b"\0"
    for key, text in zip(keys, texts.cast(pa.binary()).to_pylist(), strict=True):
        secret, cipher = key.secret, key._cipher
        if secret is None:
            bodies.append(b"")
            continue
        # The first half of the secret is the key of AES-256; the other half keys the hash that makes nonces.
        nonce = blake2b(begin + text, key=secret[KEY_BYTES:], digest_size=NONCE_BYTES).digest()
        if cipher is None:
            cipher = key._cipher = AESGCM(secret[:KEY_BYTES])
        bodies.append(key.id + nonce + cipher.encrypt(nonce, text, of))
    return _in_base64(bodies)


def _in_base64(bodies: Sequence[bytes]) -> pa.StringArray:
    """Return each of ``bodies`` in base64, all by one call.

    Each body is filled up with zeros to whole triples of bytes. The letters of what was filled in are then
    replaced by the padding ``=``.
    """
    sizes = np.fromiter(map(len, bodies), np.int64, len(bodies))
    missing = -sizes % 3
    filled = map(bytes.ljust, bodies, (sizes + missing).tolist(), repeat(b"\0"))
    whole = b"".join(filled)
    letters = np.frombuffer(bytearray(b2a_base64(whole, newline=False)), np.uint8)
    if len(letters) > _MOST_LETTERS:
        raise pa.ArrowCapacityError("What is encrypted of one row group has more than 2 GB in base64.")
    offsets = np.zeros(len(bodies) + 1, np.int32)
    np.cumsum((sizes + missing) // 3 * 4, out=offsets[1:])
    for count in (1, 2):
        letters[offsets[1:][missing >= count] - count] = ord("=")
    return pa.StringArray.from_buffers(len(bodies), pa.py_buffer(offsets), pa.py_buffer(letters))


def digest(text: str, key: bytes) -> str:
    """Return 16 hexadecimal digits for ``text``. Nobody without ``key`` (``SubjectKeys.digest_key``) can test
    guesses of the text against them."""
    return blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=8).hexdigest()


def keyed_identity(identity: str, key: bytes) -> str:
    """Return ``identity`` with the hash at its end (``DIGEST``) replaced by the ``digest`` of that hash."""
    start, end = -len('0123456789abcdef"]'), -len('"]')
    return f'{identity[:start]}{digest(identity[start:end], key)}"]'
