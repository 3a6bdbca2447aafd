"""A web page that shows a running server. It changes nothing."""
