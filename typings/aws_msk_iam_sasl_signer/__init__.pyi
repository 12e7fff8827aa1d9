"""What Rollstream uses of AWS's signer for Amazon MSK (streams/kafka/tokens.py)."""

class MSKAuthTokenProvider:
    @staticmethod
    def generate_auth_token(region: str, aws_debug_creds: bool = False) -> tuple[str, int]: ...
