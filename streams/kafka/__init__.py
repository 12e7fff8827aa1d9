"""The Kafka bus.

`bus` implements the contract, `address` parses its URL, by which `kind` opens it, `tokens` signs in
at MSK. Only `client` imports kafka-python; `log_filter` limits its log. `producer` appends,
`cursors` reads at explicit positions, `prefetch` serves polling loops, `group` is a member of a
consumer group. `admin` retries cluster requests, `removal` removes a run with it, `refusals`
explains errors, and `topic_settings` maps topics to the broker's settings.
"""
