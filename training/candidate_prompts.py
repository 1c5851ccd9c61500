"""Beginnings to choose from: some that a reader might try, some that nobody chose.

The folder keeps those whose greedy text is clear of rounding and of loops.
"""

from __future__ import annotations

from kjv_corpus import HELD_OUT_BOOKS

CANDIDATES: tuple[str, ...] = (
    "In the beginning",
    "And it came to pass",
    "And God said",
    "The LORD is my shepherd",
    "Blessed are",
    "And Jesus answered and said unto them",
    "Then said David",
    "And the king of Israel",
    "Now therefore",
    "Behold, I will",
    "The words of",
    "My son, hear",
    "And Moses",
    "And the angel of the LORD",
    "Woe unto",
    "But I say unto you",
    "In those days",
    "And when the morning was come",
    "O LORD, thou hast",
    "A wise man",
    "The sons of",
    "And Abraham",
    "And Joseph said unto his brethren",
    "Praise ye the LORD",
    "For the wrath of God",
    "Now there was a man",
    "And there came a woman",
    "Then the prophet",
    "And they took the ark",
    "Paul, an apostle of Jesus Christ",
    "The fear of the LORD",
    "And Solomon built",
    "I am the way",
    "Hear, O Israel",
    "And the waters",
    "Remember now",
    "If a man",
    "Love",
    "And the multitude",
    "A great city",
    "The ship was",
    "And Samuel",
    "Then came the disciples",
    "And Pharaoh",
    "The night",
    "Who is this",
    "When he had spoken these things",
    "And I saw",
    "Grace be unto you",
    "The heavens declare",
    "And Elijah said",
    "Brethren",
    "A certain man had two sons",
    "And the children of Israel",
    "Lift up your eyes",
    "And they went up to Jerusalem",
    "The voice of one crying",
    "And Ruth said",
    "Out of the depths",
    "And seven years",
    "The lion and the lamb",
    "And he gave them bread",
    "And the sea",
    "Thus saith the Lord GOD",
)


def held_out_beginnings(books: dict[str, str], every: int = 4, words: int = 4) -> tuple[str, ...]:
    """The first words of every fourth verse of the books that the training never saw, without repetitions."""
    verses = [line for name in HELD_OUT_BOOKS for line in books[name].split("\n") if line]
    beginnings = (" ".join(verse.split()[:words]).rstrip(",;:.") for verse in verses[::every])
    return tuple(dict.fromkeys(beginnings))
