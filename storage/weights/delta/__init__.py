"""Delta codec: encodes one tensor's bytes as the difference from the parent version's, and applies
it.

`codec` chooses the smallest coding and applies it. `coding` has the types and the byte streams,
`sparse` the payload of changed elements.
"""
