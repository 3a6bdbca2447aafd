"""The protocols of texts: each reads a request and writes its response in one API's form."""
