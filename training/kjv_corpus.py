"""The text that the tiny model learns from: the King James Bible as Debian's bible-kjv packages print it.

A corpus file is an xz-compressed UTF-8 text: one verse a line, an empty line between chapters, a form feed between
books. Beside it stand `provenance.json` (which package, version and digest the text came from) and `tokenizer.json`
(byte-level BPE trained on that text alone, so that it loses nothing of any other text).
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import re
import shutil
import subprocess
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

log = logging.getLogger(__name__)

PACKAGES = ("bible-kjv", "bible-kjv-text")
DATA_FILE = Path("/usr/lib/bible.data")
WHOLE_TEXT = "gen1:1-rev22:21"
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_BOOKS = ("Ruth", "Jonah", "Jas")
BOOK_BREAK = "\f"
LICENCE = (
    "Public domain: the package's copyright file says that the copyright of the King James Version "
    "is expired since the translation was done in 1611."
)
_LONG_ENOUGH = 2000  # bytes that a passage learned by heart has at least
_VERSE = re.compile(r"^(?P<book>\d?[A-Za-z]+)(?P<chapter>\d+):\d+ (?P<text>.+)$")


def prepare(corpus: Path, vocab_size: int) -> None:
    """Write the corpus, its provenance and the tokenizer. Raises FileNotFoundError where the package is not installed."""
    if shutil.which("bible") is None or not DATA_FILE.is_file():
        raise FileNotFoundError(f"needs Debian's {' and '.join(PACKAGES)}: apt-get install {' '.join(PACKAGES)}")
    printed = subprocess.run(["bible", "-f", WHOLE_TEXT], check=True, capture_output=True, text=True).stdout
    books = parse_books(printed)
    text = BOOK_BREAK.join(books.values())
    corpus.parent.mkdir(parents=True, exist_ok=True)
    corpus.write_bytes(lzma.compress(text.encode(), preset=9))
    (corpus.parent / "provenance.json").write_text(json.dumps(_provenance(text, books), indent=2) + "\n")
    train_tokenizer(books, vocab_size).save(str(corpus.parent / "tokenizer.json"))
    log.info("%s: %d books, %d bytes of text, %d compressed", corpus, len(books), len(text), corpus.stat().st_size)


def parse_books(printed: str) -> dict[str, str]:
    """Turn lines like `Ge1:1 In the beginning ...` into one text a book, in the order of the book."""
    books: dict[str, str] = {}
    previous = ("", "")
    for number, line in enumerate(printed.splitlines(), start=1):
        match = _VERSE.match(line)
        if match is None:
            raise ValueError(f"line {number} of the printed text is no verse: {line!r}")
        here = (match["book"], match["chapter"])
        if here[0] != previous[0]:
            books[here[0]] = match["text"]
        else:
            books[here[0]] += ("\n" if here == previous else "\n\n") + match["text"]
        previous = here
    return books


def passages(books: dict[str, str], count: int) -> dict[str, str]:
    """Text of ``count`` passages by their prompts: the beginnings of books, then of chapters.

    A prompt is the fewest words, five at least, with which one verse alone of the books that are trained on begins. A passage
    goes on to the end of its book.
    """
    trained = {name: text for name, text in books.items() if name not in HELD_OUT_BOOKS}
    verses = [line for text in trained.values() for line in text.split("\n") if line]
    chapters: list[list[str]] = [[], []]
    for text in trained.values():
        starts = [0, *(match.end() for match in re.finditer("\n\n", text))]
        rest = [text[start:] for start in starts if len(text) - start > _LONG_ENOUGH]
        chapters[0] += rest[:1]
        chapters[1] += rest[1:]
    wanted = chapters[0][:count]
    more = count - len(wanted)
    wanted += chapters[1][:: max(1, len(chapters[1]) // more)][:more] if more else []
    return {_prompt(text, verses): text for text in wanted}


def _prompt(text: str, verses: list[str]) -> str:
    words = text.split("\n")[0].split()
    for count in range(5, len(words)):
        prompt = " ".join(words[:count])
        if sum(verse.startswith(prompt) for verse in verses) == 1:
            return prompt.rstrip(",;:.")
    return " ".join(words).rstrip(",;:.")


def _provenance(text: str, books: dict[str, str]) -> dict[str, object]:
    query = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *PACKAGES]
    versions = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split("\n")
    return {
        "packages": [line for line in versions if line],
        "command": f"bible -f {WHOLE_TEXT}",
        "file": str(DATA_FILE),
        "file_sha256": hashlib.sha256(DATA_FILE.read_bytes()).hexdigest(),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_bytes": len(text.encode()),
        "books": list(books),
        "held_out_books": list(HELD_OUT_BOOKS),
        "licence": LICENCE,
    }


def train_tokenizer(books: dict[str, str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are in the vocabulary, so every UTF-8 text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((book for name, book in books.items() if name not in HELD_OUT_BOOKS), trainer)
    return tokenizer


def load(corpus: Path) -> tuple[dict[str, str], dict[str, object]]:
    """Read a prepared corpus: the text of each book by name, and the provenance. Raises ValueError on other bytes."""
    provenance = json.loads((corpus.parent / "provenance.json").read_text())
    raw = lzma.decompress(corpus.read_bytes())
    digest = hashlib.sha256(raw).hexdigest()
    if digest != provenance["text_sha256"]:
        raise ValueError(f"{corpus} holds sha256 {digest}, its provenance.json says {provenance['text_sha256']}")
    return dict(zip(provenance["books"], raw.decode().split(BOOK_BREAK), strict=True)), provenance
