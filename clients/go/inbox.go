package tmc

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/crypto/blake2b"
)

// Inbox makes the effect of each message happen once: it is committed together with a row that says so.
type Inbox struct {
	db       *sql.DB
	database Database
}

// NewInbox returns the inbox in db, which gets its tables if it has none.
func NewInbox(ctx context.Context, db *sql.DB, database Database) (*Inbox, error) {
	if err := database.createTables(ctx, db, inboxTables); err != nil {
		return nil, err
	}
	return &Inbox{db: db, database: database}, nil
}

// Once makes a handler of an effect that is written with tx. An error rolls it back.
func (i *Inbox) Once(effect func(ctx context.Context, tx *sql.Tx, m *Copy) error) Handler {
	insert := i.database.insertUnless("tmc_inbox", "subscriber, message_id, received_ms")
	return func(ctx context.Context, m *Copy) error {
		tx, err := i.db.BeginTx(ctx, nil)
		if err != nil {
			return notNow(err)
		}
		defer tx.Rollback()
		if err := i.database.hold(ctx, tx); err != nil {
			return notNow(err)
		}
		done, err := tx.ExecContext(ctx, insert, m.Subscriber, m.MessageID, nowMs())
		if err != nil {
			return notNow(err)
		}
		isNew, err := done.RowsAffected()
		if err == nil && isNew == 1 {
			isNew, err = i.advance(ctx, tx, m)
		}
		if err != nil || isNew == 0 {
			return err
		}
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		if err := i.database.release(ctx, tx); err != nil {
			return err
		}
		return tx.Commit()
	}
}

// notNow: an inbox that is down is no failure of the handler, and costs no retry.
func notNow(err error) error { return fmt.Errorf("%w: %w (%w)", errInbox, err, Later(time.Second)) }

var errInbox = errors.New("tmc: the inbox")

// advance notes the sequence of an ordered message. Returns 0: it has had its effect. Error: a later one has.
func (i *Inbox) advance(ctx context.Context, tx *sql.Tx, m *Copy) (int64, error) {
	text, isOrdered := m.Headers["tmc-sequence"]
	if !isOrdered {
		return 1, nil
	}
	sequence, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, Reject(fmt.Errorf("tmc-sequence is no number: %w", err))
	}
	hash, _ := blake2b.New(16, nil) // its error is about the size
	fmt.Fprintf(hash, "%s\x00%s\x00%s", m.Subscriber, m.Topic, m.OrderKey())
	line := hex.EncodeToString(hash.Sum(nil))
	last := int64(0)
	err = tx.QueryRowContext(ctx, i.database.sql("SELECT sequence FROM tmc_inbox_order WHERE line = ?"), line).Scan(&last)
	if errors.Is(err, sql.ErrNoRows) {
		insert := i.database.insertUnless("tmc_inbox_order", "line, subscriber, topic, order_key, sequence, changed_ms")
		done, err := tx.ExecContext(ctx, insert, line, m.Subscriber, m.Topic, m.OrderKey(), sequence, nowMs())
		if err != nil {
			return 0, notNow(err)
		}
		changed, err := done.RowsAffected()
		if err == nil && changed == 0 {
			err = fmt.Errorf("another message of order key %q is having its effect", m.OrderKey())
		}
		return changed, err
	}
	if err != nil {
		return 0, notNow(err)
	}
	move := i.database.sql("UPDATE tmc_inbox_order SET sequence = ?, changed_ms = ? WHERE line = ? AND sequence < ?")
	done, err := tx.ExecContext(ctx, move, sequence, nowMs(), line, sequence)
	if err != nil {
		return 0, notNow(err)
	}
	changed, err := done.RowsAffected()
	if err == nil && changed == 0 && last != sequence {
		err = fmt.Errorf("a later message of order key %q has had its effect", m.OrderKey())
	}
	return changed, err
}
