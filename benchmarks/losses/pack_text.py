r"""Pack the text of a folder into one compressed file, for a machine that has no such folder.

    apt-get download linux-source-6.1 && dpkg -x linux-source-6.1_*.deb . && tar xJf usr/src/*.xz
    export T=runs/texts L=linux-source-6.1 TORCH=.venv/lib/python3.11/site-packages/torch
    python -m benchmarks.losses.pack_text --folder $L --out $T/linux.xz --suffixes .c
    python -m benchmarks.losses.pack_text --folder $L --out $T/kernel.xz --suffixes .c --last 10
    STDLIB=$(python -c "import sysconfig; print(sysconfig.get_path('stdlib'))")  # of 3.11.7
    python -m benchmarks.losses.pack_text --folder $STDLIB --out $T/stdlib.xz \
        --megabytes 10 --suffixes .py
    python -m benchmarks.losses.pack_text --folder $TORCH/include --out $T/headers.xz \
        --megabytes 10 --suffixes .py .txt .md .rst .c .h .cpp .cu .json .html

Files come in the order of a hash of their path, so the head of the text is a fair sample. The same
folder gives the same text and the same SHA-256, whatever the machine.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from command_line import option, parse
from token_data import read_text, text_files


@dataclass(frozen=True)
class Options:
    """Pack the text of a folder into one .xz file.

    Programs take the text NAME from a file runs/texts/NAME.xz.
    """

    folder: str = option("", "the folder")
    out: str = option("", "the .xz file to write")
    suffixes: tuple[str, ...] = option((".py",), "endings of the files to take")
    megabytes: int = option(230, "most bytes of text, in millions")
    last: int = option(0, "keep only so many of them, from the end; 0: all")
    without: tuple[str, ...] = option(
        ("drivers/gpu/drm/amd",), "parts of paths to leave out, such as generated tables"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file and print the text's length and SHA-256."""
    options = parse(Options, arguments)
    if not options.folder or not options.out:
        raise SystemExit("pack_text: pass --folder and --out, the .xz file to write")
    packed = Path(options.out)
    files = [
        file
        for file in text_files(Path(options.folder), set(options.suffixes))
        if not any(part in file.as_posix() for part in options.without)
    ]
    if not files:
        wanted = " or ".join(options.suffixes)
        raise SystemExit(f"pack_text: no file below {options.folder} ends in {wanted}")
    pieces = read_text(files, options.megabytes * 1_000_000)
    text = b"".join(piece.tobytes() for piece in pieces)
    text = text[-options.last * 1_000_000 :] if options.last else text
    packed.write_bytes(lzma.compress(text, preset=9))
    size = packed.stat().st_size
    print(f"{len(text):,} bytes of {len(pieces)} files, SHA-256 {sha256(text).hexdigest()}")
    print(f"{packed}: {size:,} bytes")


if __name__ == "__main__":
    main()
