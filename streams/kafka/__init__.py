"""The Kafka bus's parts, of which `client.py` alone imports kafka-python. `kafka_bus.py` puts them
together.
"""
