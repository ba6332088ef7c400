from django.db import models


class Order(models.Model):
    email = models.EmailField()
    receipts_sent = models.IntegerField(default=0)
