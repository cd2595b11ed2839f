"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings, the model's card."""
