"""What a message center decides, without clocks, I/O, SQL or gRPC. Everything else imports from here, never the other way."""
