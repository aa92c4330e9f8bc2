"""What requests and duties need from the outside, by subject. Adapters implement these protocols; `app` connects them."""
