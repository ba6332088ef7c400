"""As small as they can be."""

import os

from psycopg.conninfo import conninfo_to_dict

SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "only for this example")
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
ROOT_URLCONF = "shopsite.urls"
INSTALLED_APPS = ["pulse_outbox.django", "orders"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

_given = conninfo_to_dict(os.environ["PULSE_OUTBOX_DSN"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _given["dbname"],
        "HOST": _given.get("host", ""),
        "PORT": _given.get("port", ""),
        "USER": _given.get("user", ""),
        "PASSWORD": _given.get("password", ""),
    }
}
