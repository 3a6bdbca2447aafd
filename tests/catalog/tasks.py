"""Models of random weights for the tasks of Hugging Face."""

from pathlib import Path
from typing import Any

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "serve",
    "it",
    "now",
    "a",
    "good",
    "bad",
    "film",
    ".",
    "once",
    "upon",
    "time",
]


def write_tasks(at: Path) -> None:
    """Write a model for each task into a folder of its name in `at`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words: Any = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(0)
    size = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(**size, intermediate_size=32, id2label={0: "-", 1: "+"}, label2id={"-": 0, "+": 1})
    gpt = transformers.GPT2Config(vocab_size=len(WORDS), n_embd=32, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3)
    names = {"unk_token": "[UNK]", "eos_token": "[SEP]"}
    full = {**names, "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    for task, model, tokens in (
        ("text-classification", transformers.BertForSequenceClassification(bert), full),
        ("ner", transformers.BertForTokenClassification(bert), full),
        ("fill-mask", transformers.BertForMaskedLM(bert), full),
        ("text-generation", transformers.GPT2LMHeadModel(gpt), names),  # no token for padding, as GPT-2 has none
    ):
        model.save_pretrained(at / task)
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(at / task)
