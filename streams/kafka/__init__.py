"""The parts of the Kafka bus; only `client.py` imports kafka-python. `kafka_bus.py` combines
them.
"""
