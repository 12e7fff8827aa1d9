"""OAuth tokens, from a file, a function, or signed with AWS credentials. None is logged or kept."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable
from rollstream.streams.kafka.address import TOKEN_FILE, KafkaAddress, Secrets, msk_region


def token_source(address: KafkaAddress, secrets: Secrets) -> Callable[[], str]:
    """Returns the token of a new connection. Raises `ConfigurationError` for a missing function or
    file.
    """
    if address.mechanism == "msk-iam":
        return partial(signed_token, msk_region(address))
    if address.token:
        function = find_callable(address.token, "token")
        return lambda: str(function())
    read = partial(_token_in, Path(secrets.token_file))
    read()  # a file that is not there would be missed at each connection
    return read


def _token_in(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the file of {TOKEN_FILE}, {file}, cannot be read: {error}"
        ) from None


def signed_token(region: str) -> str:
    """Returns a token, valid for 15 minutes; a connection that lives longer authenticates itself
    with the next. Raises `ConfigurationError` if AWS's signer is not installed or finds no
    credentials.
    """
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
    except ImportError:
        raise ConfigurationError(
            "mechanism=msk-iam needs AWS's signer: pip install 'rollstream[aws]'"
        ) from None
    try:
        token, _ = MSKAuthTokenProvider.generate_auth_token(region)
    except (ValueError, AttributeError):  # release 1.0.2 takes None for credentials
        raise ConfigurationError(
            f"mechanism=msk-iam, region {region}: boto3's chain finds no AWS credentials"
        ) from None
    return token
