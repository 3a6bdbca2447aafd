"""Judges texts by a Hugging Face pipeline: `weir serve app.py:Sentiment`."""

from typing import Any

from pydantic import BaseModel

import weir


class Judgement(BaseModel):
    """The label of a text, and how sure the model is."""

    label: str
    score: float


class Sentiment(weir.Model):
    """A text in, its most likely label out."""

    Input = str
    Output = Judgement
    max_batch_size = 32

    def __init__(self, model: str = "distilbert/distilbert-base-uncased-finetuned-sst-2-english") -> None:
        self._model = model

    def load(self) -> None:
        from transformers import pipeline

        self._pipeline: Any = pipeline("text-classification", model=self._model, device=self.torch_device("auto"))

    def preprocess(self, item: str) -> str:
        if not item.strip():
            raise weir.InvalidRequest("the text is empty")
        return item

    def predict(self, batch: list[str]) -> list[Judgement]:
        found = self._pipeline(batch, batch_size=len(batch), truncation=True)
        return [Judgement(label=each["label"], score=each["score"]) for each in found]
