"""What Metal's own compiler would refuse, found without it.

Two passes over the text of a launch: words and forms that Metal's language lacks, and clang with
the address spaces as types. Stricter than Metal where the two dialects differ.
"""

import re
import subprocess
from collections.abc import Iterator
from functools import cache

from mlx_k3.kernels.build import Launch

from .execute import COMPILER, HOST, SHARED_ARRAY, KernelFault
from .text import MetalText, construct_vectors, metal_text

# What is looked for in the text without comments, and what it is called.
FORBIDDEN = {
    r"\b(?:double|goto|new|delete|try|catch|throw|virtual)\b": "is not in Metal's language",
    r"\b(?:dynamic_cast|typeid|asm|thread_local|long\s+long)\b": "is not in Metal's language",
    r"\bstd::\w+": "is not in Metal's library",
    r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[-+]?\d+)?(?![\w.])": (
        "is a double in CUDA; write f after it"
    ),
    r"(?:=|\(|,|return)\s*\[[&=\w, ]*\]\s*\(": "is a lambda, which older Metal lacks",
    r"\b(?:u?int|float|bool|auto)\s+(?:half|bfloat|kernel|device|constant|thread)\b": (
        "has a keyword of Metal as its name"
    ),
    r"\binf\b": "is a macro in MLX's CUDA code; write INF",
    r"#include.*": "cannot be resolved on the device",
}
STATIC = r"\bstatic\b(?!\s+constant\b)"
# A pointer or reference to a known type; group 1 is what stands before it in its declaration.
TYPES = r"float|half|bfloat|bfloat16_t|float16_t|bool|u?char|u?short|u?int|u?int(?:8|16|32|64)_t"
SPACES = ("device", "constant", "threadgroup", "thread")


def check(launch: Launch) -> None:
    """Raise :class:`KernelFault` with what Metal's compiler would not take in ``launch``."""
    _check(metal_text(launch))


@cache
def _check(text: MetalText) -> None:
    plain = _without_comments(text.text)
    _check_language(text.kernel, plain)
    instance = f"\ntemplate decltype({text.function}) {text.function};\n"
    _check_addresses(text.kernel, plain + (instance if "<" in text.function else ""))


def _check_language(kernel: str, text: str) -> None:
    """The pass over words and forms; ``text`` has no comments."""
    for place, line in _lines(text):
        for pattern, why in FORBIDDEN.items():
            if found := re.search(pattern, line):
                raise KernelFault(f"{kernel}: {place}: {found.group().strip()} {why}")
        if re.search(STATIC, line):
            raise KernelFault(f"{kernel}: {place}: static variables are not in Metal")
        if found := _pointer_without_space(line, text):
            raise KernelFault(f"{kernel}: {place}: {found} needs an address space")
    if name := _misplaced_array(text):
        raise KernelFault(f"{kernel}: the shared array {name} is not at the top of the body")
    if function := _recursive(text):
        raise KernelFault(f"{kernel}: {function} calls itself, which Metal does not allow")


def _check_addresses(kernel: str, text: str) -> None:
    """The pass of clang; whether pointers agree with where their memory lies."""
    # C++ has no arrays of a group inside functions; as statics they have the same type.
    text = re.sub(SHARED_ARRAY, r"static threadgroup \1 \2\3", construct_vectors(text))
    shown = subprocess.run(
        [
            *(COMPILER, "--target=aarch64-linux-gnu", "-march=armv8.2-a+fp16", "-ffreestanding"),
            *("-std=c++14", "-fsyntax-only", "-fno-exceptions", "-fno-rtti"),
            *("-Wno-unknown-attributes", "-Wno-c++17-extensions", "-Wno-ignored-attributes"),
            *("-Werror=vla", "-Werror=return-type", "-Werror=uninitialized"),
            *("-I", str(HOST), "-include", "metal_addresses.h", "-x", "c++", "-"),
        ],
        input=text,
        capture_output=True,
        text=True,
    )
    if shown.returncode:
        raise KernelFault(f"{kernel}: {shown.stderr}")


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", _newlines, text, flags=re.S))


def _newlines(found: re.Match) -> str:
    return "\n" * found.group().count("\n")


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """The place of each line, as ``FILE:NUMBER``, and the line."""
    file, number = "the signature", 1
    for line in text.split("\n"):
        if marked := re.match(r'#line (\d+) "(.*)"', line):
            number, file = int(marked[1]), marked[2]
        else:
            yield f"{file}:{number}", line
            number += 1


def _pointer_without_space(line: str, text: str) -> str | None:
    types = "|".join([TYPES, *re.findall(r"\b(?:typename|struct)\s+(\w+)", text)])
    pattern = rf"([\w\s]*)\b(?:(?:{types})[234]?|auto|vec<[^<>]*>)\s*(?:[*&]|\(&)\s*\w+\s*[,)=;\[]"
    for found in re.finditer(pattern, line):
        if not re.search(
            rf"\b(?:{'|'.join(SPACES)}|DEVICE|CONST_DEVICE|THREADGROUP|LOCAL)\b", found[0]
        ):
            return found[0].strip()
    return None


def _misplaced_array(text: str) -> str | None:
    """A shared array in a helper or a block; Metal has them in the kernel's own scope only."""
    start = text.index("{", text.index("[[kernel]]"))
    for found in re.finditer(r"^[^#\n]*\bSHARED\([^,]*,\s*(\w+)", text, flags=re.M):
        before = text[start : found.start(1)]
        if found.start(1) < start or before.count("{") - before.count("}") != 1:
            return found[1]
    return None


def _recursive(text: str) -> str | None:
    """A function that calls itself, perhaps by way of others."""
    calls: dict[str, set[str]] = {}
    for found in re.finditer(r"\b(\w+)\s*\([^;{}()]*\)\s*\{", text):
        if found[1] in ("if", "for", "while", "switch"):
            continue
        body = text[found.end() : _matching_brace(text, found.end())]
        calls.setdefault(found[1], set()).update(re.findall(r"\b(\w+)\s*(?:<[^<>;]*>)?\(", body))
    for name in calls:
        seen, todo = set(), [name]
        while todo:
            for callee in calls.get(todo.pop(), ()):
                if callee == name:
                    return name
                if callee not in seen:
                    seen.add(callee)
                    todo.append(callee)
    return None


def _matching_brace(text: str, start: int) -> int:
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)
