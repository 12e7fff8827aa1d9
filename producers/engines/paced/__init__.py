"""The engine without a model: it keeps the whole engine contract on drawn lengths, at the pace of a
roofline.

`kind` is what is known before one is opened, `build` makes one of its settings. `engine` implements
the contract and has the clock, `batch` admits and preempts sequences as vLLM's scheduler does,
`lengths` draws the lengths of answers.
"""
