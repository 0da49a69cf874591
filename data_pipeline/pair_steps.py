"""Steps on both sides of aligned pairs: a pair goes where either side does, and stays as what both sides have become."""

from __future__ import annotations

from data_pipeline.document import Document
from data_pipeline.read_pairs import SIDES
from data_pipeline.step import Drop, Step


class OnBothSides(Step):
    """Applies a step to each side by itself; reasons have the side in front: source_quality_few_words."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.ledger)
        self.name, self._step = step.name, step

    def apply(self, document: Document) -> Document | Drop:
        at = document.meta["target_at"]
        sides = [document.text[: at - 1], document.text[at:]]
        for number, side in enumerate(SIDES):
            beside = {**document.meta, "side": side, "other_side": sides[1 - number]}
            result = self._step.apply(Document(document.id, sides[number], document.source, beside))
            if isinstance(result, Drop):
                return Drop(f"{side}_{result.reason}")
            if not result.text or result.text.isspace():
                return Drop(f"{side}_empty")
            sides[number] = result.text
        document.text, document.meta["target_at"] = "\n".join(sides), len(sides[0]) + 1
        return document
