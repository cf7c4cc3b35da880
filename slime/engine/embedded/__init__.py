"""The embedded engine: a small torch server that speaks SGLang's HTTP dialect, for machines without SGLang.

The way of a request: `http` parses it, `core` owns the engine's thread, `steps` makes its steps, `scheduler` decides
which sequences run, `cache` owns the KV slots and the prefixes they can share, `model` turns a batch into logits
through transformers' own model code with `attention` in the place of its attention and draws the tokens; `weights`
writes new weights into the model between two steps. `http` imports all others and nobody imports `http`.

Left out on purpose: tensor parallelism, speculative decoding, quantised weights, LoRA and multimodal input. SGLang is
the production engine; this one is there so that the whole system runs everywhere.
"""
