"""Small agents in several languages and libraries, which know the protocol of OpenAI and nothing of
Rollstream: each takes a prompt as its last argument and asks two times, the second time with the
whole history. `agents_unchanged` trains episodes of each.
"""
