"""What all tests share: signals as in a terminal."""

import signal

# A shell that starts us in the background has SIGINT ignored, and children inherit that; tests send
# it to processes of their own.
signal.signal(signal.SIGINT, signal.default_int_handler)
