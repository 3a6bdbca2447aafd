"""Continues a text word by word: `weir serve story.py:Story`. Which word follows which was learned from a tale."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import msgspec

import weir

TALE = """
The miller was the first to hear the water. The water had been low all summer, and the wheel had hardly turned; but in the
night the rain came over the hill, and in the morning the river was wide and brown and full of leaves. The miller went to
the weir and looked at the water, and the water went over the weir as it had never done before. The old boatman came to the
weir too, and said that the river would take the bridge before the night. The miller laughed, for the bridge was older than
the mill, and the mill was older than the oldest man in the valley. But in the night the river rose again, and the miller
heard the stones move below the mill, and in the morning there was no bridge. So the old boatman brought the miller and the
flour and the cat over the river in his boat, and for a whole year the boatman was the richest man in the valley.
"""


class Beginning(msgspec.Struct):
    """How the story begins, how many words it gets, and the number that decides them."""

    text: str
    words: int = 20
    seed: int = 0


class Story(weir.Model):
    """One word after the other for every story of the batch."""

    streaming = True
    Input = Beginning
    Output = str

    def load(self) -> None:
        self._follows: dict[str, list[str]] = defaultdict(list)
        words = re.findall(r"[\w'-]+", TALE)
        for word, following in pairwise(words):
            self._follows[word.lower()].append(following)

    def predict(self, batch: list[Beginning]) -> Iterator[dict[int, str]]:
        chance = [random.Random(each.seed) for each in batch]
        last = [(each.text.split() or [""])[-1] for each in batch]
        for place in range(max(each.words for each in batch)):
            going = [index for index, each in enumerate(batch) if place < each.words]
            for index in going:
                choices = self._follows.get(last[index].lower()) or ["The"]
                last[index] = chance[index].choice(choices)
            yield {index: last[index] for index in going}
