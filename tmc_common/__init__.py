"""Code shared by the SDK, the server and the command line; it imports none of them."""
