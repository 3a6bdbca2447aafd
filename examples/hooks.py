"""Hooks: work in the server process, on whole batches, while no worker is held idle for it.

weir serve examples.hooks:UserScore
curl -d 1 localhost:8000/infer/userscore
"""

from typing import Any

import weir


class Score(weir.Model):
    """Adds up the features of a user."""

    def predict(self, batch: list[list[float]]) -> list[float]:
        return [sum(features) for features in batch]


class FeatureStore:
    """Stands for a database that is asked over the network."""

    def __init__(self, features: dict[int, list[float]]) -> None:
        self._features = features
        self.asked = 0

    async def fetch(self, users: list[int]) -> dict[int, list[float]]:
        """Return the features of those users that there are."""
        self.asked += 1
        return {user: self._features[user] for user in users if user in self._features}


class UserScore(weir.Service):
    """Looks a whole batch up at once; a user that is not there is that caller's mistake alone."""

    model = Score
    store = FeatureStore({1: [1.0, 2.0], 2: [3.0, 4.0]})

    async def before_batch(self, batch: list[Any]) -> list[Any]:
        found = await self.store.fetch(batch)
        return [found.get(user) or weir.InvalidRequest(f"user {user!r}: there is none") for user in batch]

    async def after_batch(self, results: list[Any]) -> list[Any]:
        return [{"score": score} for score in results]
