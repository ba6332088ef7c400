"""A shop: orders come in over HTTP, goods are reserved by a handler."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import ForeignKey, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pulse_outbox import Event, Outbox

engine = create_async_engine(
    make_url(os.environ["PULSE_OUTBOX_DSN"]).set(drivername="postgresql+asyncpg"), pool_pre_ping=True
)
Session = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    pass


class Article(Base):
    __tablename__ = "article"
    name: Mapped[str] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Order(Base):
    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    article: Mapped[str] = mapped_column(ForeignKey("article.name"))
    reserved: Mapped[bool] = mapped_column(default=False)


# The event and its handler

outbox = Outbox()


class OrderPlaced(BaseModel):
    order_id: int


@outbox.handler("order.placed", timeout=30)
async def reserve(event: Event[OrderPlaced]) -> None:
    async with Session.begin() as session:
        # The handler may run twice. The record commits with the reservation, so the second run finds it.
        if not await outbox.first_time_async(session, event):
            return
        order = await session.get_one(Order, event.payload.order_id)
        article = await session.get_one(Article, order.article, with_for_update=True)
        article.stock -= 1
        order.reserved = True


# The web application


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with Session.begin() as session:
        await session.merge(Article(name="lamp", stock=10))
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def transaction() -> AsyncIterator[AsyncSession]:
    """Commits when the request went well, rolls back when it did not: the event goes with the order either way."""
    async with Session.begin() as session:
        yield session


# scope="function": the commit comes before the answer, so that whoever was told of an order can rely on it.
Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]


@app.post("/orders", status_code=201)
async def place(article: str, session: Transaction) -> OrderPlaced:
    order = Order(article=article)
    session.add(order)
    await session.flush()  # the order has its id now
    placed = OrderPlaced(order_id=order.id)
    await outbox.enqueue_async(session, "order.placed", placed, ordering_key=f"article:{article}")
    return placed


@app.get("/orders/{order_id}")
async def show(order_id: int, session: Transaction) -> dict[str, object]:
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    return {"article": order.article, "reserved": order.reserved}
