"""Codes of 2 to 8 bits packed into bytes, in plain torch: the one order that every version of the quantizers has.

A row of codes is one string of bits, least significant bit first: code ``j`` of ``b`` bits lies at bits ``j * b`` to
``j * b + b - 1``, and bit ``i`` of the string is bit ``i % 8`` of byte ``i // 8``. What is left of the last byte is
zero. So two codes of 4 bits are ``first | second << 4``, and codes of 8 bits are the bytes themselves.
"""

import torch

MIN_BITS, MAX_BITS = 2, 8


def packed_bytes(cols: int, bits: int) -> int:
    """Bytes of a row of ``cols`` codes of ``bits`` bits."""
    return (cols * bits + 7) // 8


def pack_reference(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``codes`` uint8 ``(rows, cols)``, each below ``2**bits``  ->  uint8 ``(rows, packed_bytes(cols, bits))``."""
    rows, cols = codes.shape
    string = (codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    padded = codes.new_zeros(rows, packed_bytes(cols, bits) * 8)
    padded[:, : cols * bits] = string.reshape(rows, cols * bits)
    return _join(padded.view(rows, -1, 8))


def unpack_reference(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """The reverse of ``pack_reference``: uint8 ``(rows, cols)``. The bits after the last code are not looked at."""
    rows = packed.shape[0]
    string = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return _join(string.reshape(rows, -1)[:, : cols * bits].reshape(rows, cols, bits))


def _join(string: torch.Tensor) -> torch.Tensor:
    """Bits ``(..., n)``, least significant first  ->  bytes ``(...)``."""
    places = torch.arange(string.shape[-1], dtype=torch.uint8, device=string.device)
    return (string << places).sum(dim=-1, dtype=torch.int32).to(torch.uint8)
