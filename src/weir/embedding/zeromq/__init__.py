"""The door of bert-as-service: its stock client works unchanged, and Weir's own gets errors too."""
