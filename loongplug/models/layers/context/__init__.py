"""Context parallel attention: a row's tokens lie on several ranks."""
