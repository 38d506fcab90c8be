"""Text and ids: tokenizers, chat templates, incremental decoding, stop strings, and the door that makes requests. No torch."""
