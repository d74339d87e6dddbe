"""The release's ``tiktoken.model`` as a standard ``tokenizer.json``.

Owns the reading of the rank file, the names of the control tokens and the pre-tokenizer pattern.
The merges, the byte alphabet and the file format are transformers' and tokenizers'.
"""

import base64
import binascii
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

CONTROL_TOKENS = 256  # ids after the last rank; most of them have no name

# How text is cut before merging. Runs of Han are pieces of their own, so the two kinds of word
# (lower case after optional capitals, capitals before optional lower case) exclude them.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_TEMPLATE = "chat_template.jinja"  # some builds have one; carried along as it is


def read_ranks(path: Path) -> dict[bytes, int]:
    """``{token bytes: rank}`` of a ``tiktoken.model`` file; the ranks are 0, 1, 2, ...

    Raises:
        CheckpointError: a line is not ``base64 rank``, a token or rank appears twice, a rank is
            missing, or one of the 256 single bytes has no token.
    """
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{path}: line {number} is not a base64 token and its rank; download the file again"
            ) from None
        if token in ranks or not token:
            raise CheckpointError(f"{path}: line {number} repeats a token or has an empty one")
        if rank in line_of_rank:
            raise CheckpointError(
                f"{path}: line {number} repeats rank {rank} of line {line_of_rank[rank]}"
            )
        ranks[token] = rank
        line_of_rank[rank] = number

    for expected, rank in enumerate(sorted(line_of_rank)):
        if rank != expected:
            raise CheckpointError(
                f"{path}: rank {expected} is missing (line {line_of_rank[rank]} has rank {rank})"
            )
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise CheckpointError(f"{path}: no token for the single byte 0x{byte:02x}")
    return ranks


def control_names(config: dict[str, Any], first_id: int) -> list[str]:
    """Names of the control tokens ``first_id .. first_id + 255``, in the order of their ids.

    ``config`` is the release's ``tokenizer_config.json``; a slot it does not name is
    ``<|reserved_token_ID|>``.

    Raises:
        CheckpointError: a name outside the slots, or one name for two slots.
    """
    names = {i: f"<|reserved_token_{i}|>" for i in range(first_id, first_id + CONTROL_TOKENS)}
    added = config.get("added_tokens_decoder", {})
    if not isinstance(added, dict):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder is not an object")
    for key, value in added.items():
        name = value.get("content") if isinstance(value, dict) else value
        if not key.isdecimal() or int(key) not in names or not isinstance(name, str) or not name:
            raise CheckpointError(
                f"tokenizer_config.json: {key} is no control token; "
                f"they are {first_id} to {first_id + CONTROL_TOKENS - 1} after the vocabulary's end"
            )
        names[int(key)] = name
    if len(set(names.values())) != CONTROL_TOKENS:
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder repeats a name")
    return list(names.values())


def write_tokenizer(source: Path, out: Path) -> list[Path]:
    """Write ``source``'s tokenizer to ``out`` as files that load without remote code.

    A folder with ``tiktoken.model`` is converted; one with ``tokenizer.json`` is copied. A folder
    with neither (a checkpoint without tokenizer) gives nothing.

    Returns:
        The files written.

    Raises:
        CheckpointError: a tokenizer file is missing or malformed.
    """
    ranks_file = source / "tiktoken.model"
    standard = source / "tokenizer.json"
    if not ranks_file.exists() and not standard.exists():
        return []
    config = _read_config(source / "tokenizer_config.json")
    if ranks_file.exists():
        written, copied = [_write_converted(ranks_file, config, out)], [_TEMPLATE]
    else:
        written, copied = [], ["tokenizer.json", "special_tokens_map.json", _TEMPLATE]
    for name in copied:
        if (source / name).exists():
            written.append(Path(shutil.copyfile(source / name, out / name)))

    # A class or code of the release would need trust_remote_code; the control tokens are in
    # tokenizer.json.
    for key in ("auto_map", "added_tokens_decoder"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["clean_up_tokenization_spaces"] = False
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [*written, path]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; it names the control tokens, download it too"
        ) from None
    except ValueError as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return config


def _write_converted(ranks_file: Path, config: dict[str, Any], out: Path) -> Path:
    # Imported here: transformers takes a second, which a refused conversion need not wait for. It
    # would also advise to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = read_ranks(ranks_file)
    names = control_names(config, len(ranks))
    converter = TikTokenConverter(str(ranks_file), PATTERN, extra_special_tokens=names)
    # tiktoken's own reader keeps a copy of each file by its path and would answer from that.
    converter.load_tiktoken_bpe = lambda _: ranks
    tokenizer = converter.converted()
    for name, expected in zip(names, range(len(ranks), len(ranks) + CONTROL_TOKENS), strict=True):
        if tokenizer.token_to_id(name) != expected:
            raise CheckpointError(
                f"tokenizer_config.json: control token {name!r} is also an ordinary token"
            )
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None and content not in names:
            raise CheckpointError(f"tokenizer_config.json: {role} {content!r} is no control token")
    path = out / "tokenizer.json"
    tokenizer.save(str(path), pretty=False)
    return path
