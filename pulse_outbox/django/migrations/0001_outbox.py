from pulse_outbox.django.numbered import numbered

Migration = numbered(__name__)
