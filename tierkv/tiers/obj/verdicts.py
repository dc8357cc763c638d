"""What is known of the objects of a bucket, so that not each lookup and each store asks for each one."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
from cachetools import TTLCache

from tierkv.tiers.known import Known, Words
from tierkv.types import Flags

#: For so long nobody looks again for what was not there; who has computed it meanwhile stores it without asking for it
#: first, for longer: it is written under the condition that it is not there. Of so many chunks this is remembered.
ABSENT_S, _STORE_S, _MOST_ABSENT = 2.0, 60.0, 1 << 16
#: For so long, and of so many, it is remembered that they were refused.
_REFUSED_S, _MOST_REFUSED = 3600.0, 1 << 16


class Verdicts:
    """By the first words of keys: what is *there*, what was *absent* just now, and what was *refused*.

    All are hints. What was refused was loaded and was no good: it is as absent until somebody has written it anew.

    Thread safety: any method may be called by any thread.
    """

    def __init__(self) -> None:
        self.known = Known()
        self._lock = threading.Lock()
        #: When it was not there; -inf: not asked for, since nothing before it was there.
        self._absent: TTLCache[int, float] = TTLCache(_MOST_ABSENT, _STORE_S)
        #: The tag of the object that was.
        self._refused: TTLCache[int, str | None] = TTLCache(_MOST_REFUSED, _REFUSED_S)

    def of(self, words: Words) -> tuple[Flags, Flags]:
        """Which of ``words``, ``(n,)``, are there, and which are not; nothing is known of those that are neither."""
        there = self.known.has(words)
        since = time.monotonic() - ABSENT_S
        with self._lock:
            if not self._absent and not self._refused:
                return there, np.zeros(len(words), np.bool_)
            not_there = [self._absent.get(word, -math.inf) > since or word in self._refused for word in words.tolist()]
        absent = np.array(not_there, np.bool_)
        return there & ~absent, absent

    def was_absent(self, word: int) -> bool:
        """Whether it was not there lately, or will not have been: to be stored without asking for it."""
        with self._lock:
            return word in self._absent

    def was_refused(self, word: int) -> bool:
        with self._lock:
            return word in self._refused

    def is_another(self, word: int, e_tag: str | None) -> bool:
        """Of what was refused: whether an object with this tag has come in its place. That one may be good."""
        with self._lock:
            if e_tag is None or self._refused.get(word, e_tag) == e_tag:
                return False
            self._refused.pop(word, None)
            return True

    @property
    def any_refused(self) -> bool:
        with self._lock:
            return bool(self._refused)

    def there(self, word: int) -> None:
        """Somebody has seen it, or written it."""
        self.known.add(word)
        with self._lock:
            self._absent.pop(word, None)

    def good(self, word: int) -> None:
        """It is there, and what it should be: it was read, or written."""
        with self._lock:
            self._refused.pop(word, None)
        self.there(word)

    def absent(self, word: int) -> None:
        with self._lock:
            self._absent[word] = time.monotonic()
        self.known.remove(word)

    def likely_absent(self, words: Words) -> None:
        """They were not asked for, since nothing of their prompt was there."""
        with self._lock:
            for word in words.tolist():
                self._absent.setdefault(word, -math.inf)

    def refused(self, word: int, e_tag: str | None) -> None:
        with self._lock:
            self._refused[word] = e_tag
        self.known.remove(word)

    def __repr__(self) -> str:
        with self._lock:
            return f"Verdicts(known={len(self.known)}, absent={len(self._absent)}, refused={len(self._refused)})"
