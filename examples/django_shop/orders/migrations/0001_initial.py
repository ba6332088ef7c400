from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    # The outbox is there before anything that enqueues.
    dependencies = [("pulse_outbox", "0001_outbox")]
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("email", models.EmailField(max_length=254)),
                ("receipts_sent", models.IntegerField(default=0)),
            ],
        ),
    ]
