"""Kafka's errors explained, by the names of kafka-python's classes, so this file needs no
client.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from rollstream.os_failures import explain_os_error

TIME_LIMITS = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")
"""Topic settings by which a broker refuses records whose time differs from its own clock."""
UNLIMITED_MS = (1 << 63) - 1
TEXT_MAX = 300  # characters of a broker's own text that a message quotes

_RIGHTS = (
    "this client may not do that: give its user the rights of docs/reference/kafka.md (who may "
    "write what)"
)
_LOGIN = (
    "the broker does not accept this login: check user, password or token in the environment, and "
    "security and mechanism in the bus URL"
)
_TRUST = (
    "the broker's certificate is not trusted: name the file of its authority by ca=… in the bus "
    "URL, and the broker by a host name that the certificate has"
)
_CLOCK = (
    "the record's time is too far from the broker's clock: set this machine's clock (NTP), or lift "
    "the topic's limit: {lifted}"
)
_SIZE = (
    "the broker accepts no batch of this size: raise max.message.bytes of the topic (and "
    "message.max.bytes, segment.bytes of the broker) to what docs/reference/kafka.md lists"
)
_TOPIC_POLICY = (
    "the cluster allows no topic with these settings: ask its administrator, or create the topics "
    "by hand with the settings of docs/reference/kafka.md"
)
_COPIES = (
    "the cluster has fewer brokers than replicas are requested: lower replication=… in the bus "
    "URL, or start more brokers"
)
_IN_SYNC = (
    "fewer brokers are in sync than min.insync.replicas of the topic: start the missing brokers"
)
_NAME = (
    "Kafka does not accept the topic's name; in names '.' and '_' count as equal: give another "
    "prefix in the bus URL, kafka://HOST:PORT/PREFIX"
)
_DISK = "the broker cannot use its disk: make room on it, or look at the broker's log"
_QUOTA = "the cluster throttles this client: raise its quota, or wait"
_OLD = (
    "the broker's release lacks what this client needs: docs/reference/kafka.md names the oldest "
    "release"
)
_RESENT = (
    "the broker has no state of this producer any more, so the order of its records is unknown: a "
    "restarted process sends them again, and readers drop repeats"
)
_GROUP = (
    "the consumer group has other members or other limits: docs/reference/kafka.md names the "
    "broker's settings; stop programs of another release"
)
_MISSING = (
    "the topic or group is not there: it was deleted, or another prefix is meant; check the bus URL"
)
_DAMAGED = "the broker did not accept the bytes of the batch: they were damaged on the way"
_ELECTION = (
    "the brokers are choosing leaders or moving replicas: check that all of them run, and that "
    "the cluster has a controller"
)
_ADMIN_FLAG = "the cluster does not allow that: its administrator has switched it off"
_NETWORK = (
    "check that the brokers run and can be reached from here, and the security settings of the URL"
)
_UNEXPECTED = "the broker's log has the reason"

_NAMES = {
    _RIGHTS: "TopicAuthorizationFailed GroupAuthorizationFailed ClusterAuthorizationFailed "
    "TransactionalIdAuthorizationFailed DelegationTokenAuthorizationFailed Authorization",
    _LOGIN: "SaslAuthenticationFailed UnsupportedSaslMechanism IllegalSaslState SecurityDisabled "
    "DelegationTokenAuthDisabled DelegationTokenNotFound DelegationTokenOwnerMismatch "
    "DelegationTokenRequestNotAllowed DelegationTokenExpired InvalidPrincipalType "
    "UnacceptableCredential PrincipalDeserializationFailure",
    _CLOCK: "InvalidTimestamp",
    _SIZE: "MessageSizeTooLarge RecordListTooLarge OffsetMetadataTooLarge InvalidCommitOffsetSize",
    _TOPIC_POLICY: "PolicyViolation InvalidConfiguration InvalidPartitions "
    "InvalidReplicationAssignment",
    _COPIES: "InvalidReplicationFactor",
    _IN_SYNC: "NotEnoughReplicas NotEnoughReplicasAfterAppend",
    _NAME: "InvalidTopic",
    _DISK: "KafkaStorage LogDirNotFound",
    _QUOTA: "ThrottlingQuotaExceeded QuotaViolation",
    _OLD: "UnsupportedVersion UnsupportedForMessageFormat UnsupportedCompressionType "
    "UnsupportedCodec InvalidRequest InvalidFetchRequest InvalidRequiredAcks InvalidUpdateVersion "
    "IncompatibleBrokerVersion UnrecognizedBrokerVersion",
    _RESENT: "OutOfOrderSequenceNumber DuplicateSequenceNumber InvalidProducerEpoch "
    "UnknownProducerId ProducerFenced InvalidProducerIdMapping InvalidTxnState "
    "InvalidTransactionTimeout ConcurrentTransactions TransactionCoordinatorFenced "
    "TransactionAborted TransactionAbortable TransactionalIdNotFound",
    _GROUP: "InconsistentGroupProtocol InvalidGroupId InvalidSessionTimeout GroupMaxSizeReached "
    "IllegalGeneration UnknownMemberId RebalanceInProgress FencedInstanceId MemberIdRequired "
    "NonEmptyGroup GroupSubscribedToTopic CommitFailed UnstableOffsetCommit UnsupportedAssignor "
    "FencedMemberEpoch StaleMemberEpoch UnreleasedInstanceId",
    _MISSING: "UnknownTopicOrPartition UnknownTopicId GroupIdNotFound ResourceNotFound "
    "TopicAlreadyExists OffsetOutOfRange LogTruncation NoOffsetForPartition InconsistentTopicId "
    "FetchSessionTopicId OffsetMovedToTieredStorage",
    _DAMAGED: "CorruptRecord InvalidRecord KafkaProtocol CorrelationId InvalidReceive",
    _ELECTION: "LeaderNotAvailable NotLeaderForPartition ReplicaNotAvailable NotController "
    "PreferredLeaderNotAvailable EligibleLeadersNotAvailable FencedLeaderEpoch UnknownLeaderEpoch "
    "OffsetNotAvailable CoordinatorLoadInProgress CoordinatorNotAvailable NotCoordinator "
    "StaleControllerEpoch StaleBrokerEpoch ReassignmentInProgress ElectionNotNeeded "
    "NoReassignmentInProgress OperationNotAttempted InconsistentVoterSet",
    _ADMIN_FLAG: "TopicDeletionDisabled FeatureUpdateFailed",
    _NETWORK: "KafkaConnection KafkaTimeout RequestTimedOut BrokerNotAvailable NetworkException "
    "NodeNotReady ListenerNotFound MetadataEmptyBrokerList StaleMetadata Cancelled "
    "TooManyInFlightRequests FetchSessionIdNotFound InvalidFetchSessionEpoch UnknownBrokerId",
}
ADVICE = {name: advice for advice, names in _NAMES.items() for name in names.split()}
"""By kafka-python's name of the error, without `Error` at its end, what to do."""


def lift_time_limits(topic: str) -> str:
    """Returns the command, with the topic's name on the cluster."""
    limits = ",".join(f"{name}={UNLIMITED_MS}" for name in TIME_LIMITS)
    return (
        "kafka-configs --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name "
        f"{topic} --add-config {limits}"
    )


_DUMP = re.compile(r"\s*\b(Request|Response)?\s*'?\w*(Request|Response)\b.*", re.DOTALL)
_CODE = re.compile(r"^\[Error -?\d+\] ")


def open_client(make: Any, settings: Mapping[str, Any]) -> Any:
    """Opens a client; a refused login or certificate is raised as such."""
    # kafka-python connects again until a time-out, whose text names neither.
    failures: list[Exception] = []

    def connect(**configs: Any) -> Any:
        network = make.DEFAULT_CONFIG["kafka_client"](**configs)
        get_connection = network._manager.get_connection

        def get_watched(*args: Any, **more: Any) -> Any:
            connection = get_connection(*args, **more)
            connection.init_future.add_errback(failures.append)
            return connection

        network._manager.get_connection = get_watched
        return network

    try:
        return make(**settings, kafka_client=connect)
    except Exception as late:
        causes = [why for why in failures if is_permanent(why) or "CERTIFICATE" in str(why)]
        if type(late).__name__ == "KafkaTimeoutError" and causes:
            raise causes[-1] from late
        raise


def is_permanent(error: Exception) -> bool:
    """Returns whether a broker rejected the request, and would reject it again."""
    is_answer = hasattr(error, "description")  # of kafka-python's `BrokerResponseError` alone
    # No broker sent a heartbeat since a start or a pause of all: later the topic can be placed.
    is_unplaced = "brokers are currently fenced" in str(error)
    return is_answer and not (getattr(error, "retriable", False) or is_unplaced)


def explain_error(error: Exception, topic: str = "") -> str:
    """Returns the broker's own words as far as they are short, and the remedy; `topic` is the name
    on the cluster.
    """
    if isinstance(error, OSError):
        return explain_os_error(error)
    kind = type(error).__name__.removesuffix("Error")
    broker_text = _words_of(error)
    advice = ADVICE.get(kind, _UNEXPECTED)
    if kind == "InvalidRecord" and "imestamp" in broker_text:  # several records of one batch
        advice = _CLOCK
    if "CERTIFICATE" in broker_text:
        advice = _TRUST
    if kind == "InvalidTopic" and "collides" not in broker_text:
        advice = advice.replace("; in names '.' and '_' count as equal", "")
    return f"{broker_text}; {advice.format(lifted=lift_time_limits(topic or 'TOPIC'))}"


def _words_of(error: Exception) -> str:
    text = _CODE.sub("", str(error))
    # Some errors dump the request.
    short = _DUMP.sub("", text).rstrip(" :'.")
    if not short or short == type(error).__name__:
        short = ": ".join(filter(None, (type(error).__name__, getattr(error, "description", ""))))
    name = f"{type(error).__name__}: "
    line = " ".join(short.split()).rstrip(".").replace(name + name, name)
    return line if len(line) <= TEXT_MAX else line[: TEXT_MAX - 1] + "…"


class OffsetOutOfRange(Exception):
    """`places` are all such partitions that kafka-python's error names."""

    def __init__(self, text: str, places: Collection[tuple[str, int]] = ()) -> None:
        super().__init__(text)
        self.places = frozenset(places)


class NoCommittedPosition(Exception):
    """The group has no committed position in a partition that was assigned to this member."""
